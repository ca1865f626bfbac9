// SPDX-License-Identifier: Apache-2.0
//! [`Life`]: two spaces and seven devices that do everything there is to do, in a fixed order.

use crate::kit::{
    Actor, Build, Failing, Fails, Machine, Stopped, end, other_space_of, own_frames, space_of,
};
use pagetide_addr::{Access, DeviceId, Pa, PageRange, Va};
use pagetide_gmem::{
    Activation, AddressSpace, GmError, Inherited, MapOptions, Mapped, MappingSet, Mode, Placement,
    Protection, Region, RegionRequest,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

const SPACE_PAGES: u64 = 64;
const CPU_MEMORY: u64 = 0x100_0000;
const GPU_MEMORY: u64 = 0x4000_0000;
const MEMORY_FRAMES: u64 = 24;

const CPU: usize = 0;
const GPU: usize = 1;
const SHARERS: [usize; 2] = [2, 3];
const PINNED: usize = 4;
const LATE: usize = 5;
const HEIR: usize = 6;

type Step = fn(&mut Life) -> Result<(), GmError>;

/// What is done, and what it is called in a failure.
pub const STEPS: [(&str, Step); 24] = [
    ("attach", attach),
    ("allocate", allocate),
    ("wire", wire),
    ("use what is wired", use_wired),
    ("fault", fault),
    ("migrate", migrate),
    ("remote access", remote_access),
    ("home", home),
    ("protect: read only", |life| {
        life.protect(Protection::ReadOnly)
    }),
    ("read under protection", read_all),
    ("protect: nothing", |life| life.protect(Protection::Nothing)),
    ("attach under protection", attach_late),
    ("protect: all", |life| life.protect(Protection::ReadWrite)),
    ("use all", use_all),
    ("prefetch", prefetch),
    ("unmap and wire anew", rewire),
    ("asynchronous", asynchronous),
    ("mapping set", mapping_set),
    ("the other space", other_space),
    ("switch back", |life| {
        life.actors[GPU].device.switch(&life.spaces[0])
    }),
    ("the maker of a table leaves", maker_leaves),
    ("use all again", use_all),
    ("give regions back", give_back),
    ("detach", detach),
];

pub struct Life {
    pub machine: Machine,
    pub spaces: [Arc<AddressSpace>; 2],
    pub actors: Vec<Actor>,
    pub regions: Vec<Region>,
    /// First frame of what a region was last asked to be wired to.
    frames: HashMap<Va, u64>,
    /// Protections that all devices keep.
    pub protections: HashMap<Va, Protection>,
    /// What was written last: it must be what is read.
    shadow: HashMap<u64, u64>,
    set: MappingSet,
    pub last: Option<GmError>,
    stamp: u64,
}

/// What was missed because of an earlier failure.
const MISSED: Result<(), GmError> = Err(GmError::Destroyed);

impl Life {
    pub fn new() -> Self {
        let machine = Machine::eager();
        let inherited = vec![Inherited {
            start: Va(0x400_0000 + 8 * 4096),
            len_bytes: 2 * 4096,
            access: Access::Write,
            frames: Pa(0x7000_0000),
        }];
        let builds = [
            Build {
                id: Some(DeviceId::VCPUS),
                ..Build::default()
            },
            Build::default(),
            Build::of_format(7),
            Build::of_format(7),
            Build::failing(),
            Build::failing(),
            Build {
                inherited,
                ..Build::default()
            },
        ];
        let actors: Vec<_> = builds.map(|build| machine.actor(build)).into();
        actors[CPU].give_memory(CPU_MEMORY, MEMORY_FRAMES);
        actors[GPU].give_memory(GPU_MEMORY, MEMORY_FRAMES);
        let spaces = [space_of(SPACE_PAGES), other_space_of(SPACE_PAGES)];
        Self {
            set: MappingSet::new(&spaces[0]),
            machine,
            spaces,
            actors,
            regions: Vec::new(),
            frames: HashMap::new(),
            protections: HashMap::new(),
            shadow: HashMap::new(),
            last: None,
            stamp: 0,
        }
    }

    pub fn is_in_a_pool(&self, pa: u64) -> bool {
        let pools = [CPU_MEMORY, GPU_MEMORY];
        pools
            .iter()
            .any(|begin| (*begin..begin + MEMORY_FRAMES * 4096).contains(&pa))
    }

    /// The frame that was wired for a page; inherited ones are known by their place.
    pub fn wired_frame(&self, region: &Region, page: u64) -> Option<u64> {
        let at = (page - region.pages().start.0) * 4096;
        let inherited = 0x7000_0000 + at;
        self.frames
            .get(&region.start())
            .map_or(Some(inherited), |first| Some(first + at))
    }

    /// Errors are over: all must go, and nothing be left.
    pub fn end(self, plan: &Failing) {
        for space in &self.spaces {
            // Queued operations that fail are told; that is over with this.
            if let Err(error) = space.synchronize() {
                assert!(space.synchronize().is_ok(), "{plan:?}: after {error}");
            }
        }
        let Self {
            machine,
            spaces,
            actors,
            ..
        } = self;
        let all: Vec<&Actor> = actors.iter().collect();
        for space in &spaces {
            for region in space.regions() {
                let gone = region.dealloc();
                gone.unwrap_or_else(|error| panic!("{plan:?}: {region:?}: {error}"));
            }
            for actor in &actors {
                match actor.device.detach(space) {
                    Ok(()) | Err(GmError::NotAttached { .. }) => {}
                    Err(error) => panic!("{plan:?}: {error}"),
                }
            }
        }
        if plan.how == Fails::Panics {
            // A table whose driver panicked while it was made ready is nobody's.
            let mut world = machine.world();
            let left = world
                .tables
                .values_mut()
                .filter(|table| table.destroyed == 0);
            let count = left.map(|table| table.destroyed = 1).count();
            assert!(count <= 1, "{plan:?}: {count} tables are left");
        }
        for space in &spaces {
            end(&machine, space, &all);
        }
        for actor in &actors {
            actor.device.destroy().unwrap();
        }
    }

    fn region(&self, number: usize) -> Result<Region, GmError> {
        self.regions.get(number).cloned().ok_or(GmError::Destroyed)
    }

    fn map(&mut self, region: &Region, first: u64, set: Option<MappingSet>) -> Result<(), GmError> {
        let frames = own_frames(first, region.pages().len());
        if region.mapped() == Mapped::Nothing {
            self.forget(region);
            self.frames.insert(region.start(), frames[0].0);
        }
        let options = MapOptions {
            set,
            ..MapOptions::new(Access::Write)
        };
        region.map(&frames, &options)
    }

    /// The region's content is gone.
    fn forget(&mut self, region: &Region) {
        let begin = region.start().0;
        self.shadow
            .retain(|va, _| !(begin..begin + region.len_bytes()).contains(va));
    }

    fn unmap(&mut self, region: &Region) -> Result<(), GmError> {
        region.unmap()?;
        self.forget(region);
        Ok(())
    }

    /// Writes to each page, and remembers it.
    fn write(&mut self, actor: usize, pages: PageRange) -> Result<(), GmError> {
        for page in pages.iter() {
            let va = page.byte_offset() + 16;
            self.stamp += 1;
            match self.actors[actor].try_write(va, self.stamp) {
                Ok(()) => self.shadow.insert(va, self.stamp),
                Err(stopped) => return refusal(stopped),
            };
        }
        Ok(())
    }

    /// Reads each page that was written.
    fn read(&self, actor: usize, pages: PageRange) -> Result<(), GmError> {
        for page in pages.iter() {
            let va = page.byte_offset() + 16;
            match self.actors[actor].try_read(va) {
                Ok(value) => {
                    if let Some(known) = self.shadow.get(&va) {
                        assert_eq!(value, *known, "what was written to {va:#x} is lost");
                    }
                }
                Err(stopped) => return refusal(stopped),
            }
        }
        Ok(())
    }

    fn protect(&mut self, protection: Protection) -> Result<(), GmError> {
        for number in [0, 1] {
            let region = self.region(number)?;
            self.protections.remove(&region.start());
            region.protect(protection)?;
            self.protections.insert(region.start(), protection);
        }
        Ok(())
    }
}

fn refusal(stopped: Stopped) -> Result<(), GmError> {
    match stopped {
        Stopped::Refused(error) => Err(error),
        Stopped::NoTranslation => MISSED,
    }
}

fn attach(life: &mut Life) -> Result<(), GmError> {
    let mut outcome = Ok(());
    for (number, mode) in [
        (CPU, Mode::Coherent),
        (GPU, Mode::Coherent),
        (SHARERS[0], Mode::Shared),
        (SHARERS[1], Mode::Shared),
        (PINNED, Mode::Coherent),
    ] {
        outcome = outcome.and(life.actors[number].join(&life.spaces[0], mode));
    }
    outcome
}

fn allocate(life: &mut Life) -> Result<(), GmError> {
    for pages in [3, 3, 12, 2] {
        let request = RegionRequest::of_bytes(pages * 4096);
        life.regions.push(life.spaces[0].alloc(&request)?);
    }
    Ok(())
}

fn wire(life: &mut Life) -> Result<(), GmError> {
    let region = life.region(0)?;
    life.map(&region, 0, None)
}

fn use_wired(life: &mut Life) -> Result<(), GmError> {
    let pages = life.region(0)?.pages();
    let wrote = life.write(CPU, pages);
    let mut outcome = wrote;
    for actor in [PINNED, GPU, SHARERS[0], SHARERS[1]] {
        outcome = outcome.and(life.read(actor, pages));
    }
    outcome
}

fn fault(life: &mut Life) -> Result<(), GmError> {
    let pages = life.region(1)?.pages();
    let wrote = life.write(GPU, pages);
    wrote.and(life.read(GPU, pages))
}

fn migrate(life: &mut Life) -> Result<(), GmError> {
    let pages = life.region(1)?.pages();
    let mut outcome = Ok(());
    for actor in [CPU, SHARERS[0], GPU, SHARERS[1], CPU] {
        outcome = outcome.and(life.read(actor, pages));
        outcome = outcome.and(life.write(actor, pages));
    }
    outcome
}

fn remote_access(life: &mut Life) -> Result<(), GmError> {
    let region = life.region(1)?;
    region.set_policy(Placement::RemoteAccess, None)?;
    let mut outcome = Ok(());
    for actor in [GPU, SHARERS[0], CPU] {
        outcome = outcome.and(life.read(actor, region.pages()));
        outcome = outcome.and(life.write(actor, region.pages()));
    }
    outcome
}

fn home(life: &mut Life) -> Result<(), GmError> {
    let region = life.region(1)?;
    region.set_policy(Placement::Unique, Some(&life.actors[GPU].device))?;
    life.protect(Protection::Nothing)?;
    life.protect(Protection::ReadWrite)?;
    life.read(CPU, region.pages())?;
    region.set_policy(Placement::Unique, None)?;
    life.write(SHARERS[0], region.pages())
}

fn read_all(life: &mut Life) -> Result<(), GmError> {
    let mut outcome = Ok(());
    for number in [0, 1] {
        let pages = life.region(number)?.pages();
        for actor in [CPU, GPU, SHARERS[1]] {
            outcome = outcome.and(life.read(actor, pages));
        }
    }
    outcome.and(life.read(PINNED, life.region(0)?.pages()))
}

fn attach_late(life: &mut Life) -> Result<(), GmError> {
    life.actors[LATE].join(&life.spaces[0], Mode::Coherent)
}

fn use_all(life: &mut Life) -> Result<(), GmError> {
    let mut outcome = read_all(life);
    let wired = life.region(0)?.pages();
    for actor in [PINNED, LATE, CPU, GPU] {
        outcome = outcome.and(life.read(actor, wired));
        outcome = outcome.and(life.write(actor, wired));
    }
    for actor in [SHARERS[1], GPU] {
        outcome = outcome.and(life.write(actor, life.region(1)?.pages()));
    }
    outcome
}

fn prefetch(life: &mut Life) -> Result<(), GmError> {
    let region = life.region(2)?;
    region.set_policy(Placement::Prefetch, None)?;
    let first = region.pages().start.single();
    life.write(CPU, first)?;
    life.spaces[0].synchronize()?;
    life.write(CPU, region.pages())?;
    life.read(GPU, first)?;
    life.spaces[0].synchronize()?;
    life.read(GPU, region.pages())?;
    life.spaces[0].synchronize()
}

fn rewire(life: &mut Life) -> Result<(), GmError> {
    let (wired, demand) = (life.region(0)?, life.region(1)?);
    let mut outcome = life.unmap(&wired).and(life.unmap(&demand));
    outcome = outcome.and(life.map(&wired, 16, None));
    outcome = outcome.and(life.map(&demand, 32, None));
    outcome = outcome.and(life.write(PINNED, demand.pages()));
    outcome = outcome.and(life.read(GPU, demand.pages()));
    outcome.and(life.unmap(&demand))
}

fn asynchronous(life: &mut Life) -> Result<(), GmError> {
    let told = Arc::new(Mutex::new(0));
    let count = || {
        let told = Arc::clone(&told);
        let counted = move |_: Result<(), GmError>| *told.lock().unwrap() += 1;
        Some(Box::new(counted) as pagetide_gmem::Callback)
    };
    let (wired, other, pages) = (life.region(0)?, life.region(3)?, life.region(2)?);
    wired.unmap_later(count())?;
    pages.unmap_later(count())?;
    if other.mapped() == Mapped::Nothing {
        life.frames.insert(other.start(), own_frames(48, 1)[0].0);
    }
    other.map_later(own_frames(48, 2), MapOptions::new(Access::Write), count())?;
    let outcome = life.spaces[0].synchronize();
    assert_eq!(
        *told.lock().unwrap(),
        3,
        "each callback once, whatever fails"
    );
    for region in [&wired, &pages] {
        if region.mapped() == Mapped::Nothing {
            life.forget(region);
        }
    }
    let unmapped = other.unmap_later(None);
    let outcome = outcome.and(unmapped).and(life.spaces[0].synchronize());
    outcome.and(life.map(&wired, 0, None))
}

fn mapping_set(life: &mut Life) -> Result<(), GmError> {
    let (one, two) = (life.region(1)?, life.region(3)?);
    let set = life.set.clone();
    let mut outcome = life.map(&one, 32, Some(set.clone()));
    outcome = outcome.and(life.map(&two, 40, Some(set.clone())));
    outcome = outcome.and(life.write(GPU, one.pages()));
    outcome = outcome.and(set.unmap());
    let again = set.mapping_count();
    if outcome.is_ok() {
        assert_eq!(again, 0);
    }
    for region in [&one, &two] {
        if region.mapped() == Mapped::Nothing {
            life.forget(region);
        }
    }
    outcome.and(set.unmap())
}

fn other_space(life: &mut Life) -> Result<(), GmError> {
    let other = Arc::clone(&life.spaces[1]);
    let mut outcome = life.actors[GPU].join(&other, Mode::Coherent);
    let request = RegionRequest::of_bytes(2 * 4096);
    let region = other.alloc(&request)?;
    outcome = outcome.and(life.map(&region, 100, None));
    outcome = outcome.and(life.write(GPU, region.pages()));
    let heir = &life.actors[HEIR].device;
    outcome = outcome.and(other.attach(heir, Mode::Coherent, Activation::Later));
    outcome = outcome.and(heir.switch(&other));
    outcome = outcome.and(life.read(HEIR, region.pages()));
    outcome
}

fn maker_leaves(life: &mut Life) -> Result<(), GmError> {
    let left = life.actors[SHARERS[0]].device.detach(&life.spaces[0]);
    let (wired, demand) = (life.region(0)?.pages(), life.region(1)?.pages());
    let mut outcome = life.read(SHARERS[1], wired);
    outcome = outcome.and(life.write(SHARERS[1], demand));
    outcome = outcome.and(life.write(GPU, demand));
    outcome.and(left)
}

fn give_back(life: &mut Life) -> Result<(), GmError> {
    let mut outcome = Ok(());
    for region in life.spaces[0].regions() {
        outcome = outcome.and(region.dealloc());
    }
    outcome
}

fn detach(life: &mut Life) -> Result<(), GmError> {
    let mut outcome = Ok(());
    for (number, actor) in life.actors.iter().enumerate() {
        for (at, space) in life.spaces.iter().enumerate() {
            let is_there = match number {
                GPU => true,
                HEIR => at == 1,
                _ => at == 0 && number != SHARERS[0],
            };
            if is_there {
                outcome = outcome.and(actor.device.detach(space));
            }
        }
    }
    outcome
}
