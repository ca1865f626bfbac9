// SPDX-License-Identifier: Apache-2.0
//! Where a fault is handled: vCPU-affined placement (VPRI 6.1).
//!
//! 1. Only on CPUs of the tenant that faulted, so that no other tenant's vCPUs
//!    are disturbed. They are the CPUs that the VMM's vCPU threads may run on,
//!    if an affinity is set; on a host where every thread may run everywhere
//!    they are those on which the vCPUs last ran.
//! 2. Of these, the CPU that takes the device's interrupts. A queue's interrupt
//!    has a vector; Linux' block layer spreads the vectors of a virtio device
//!    over the vCPUs by their numbers, so vector `v` goes to vCPU `v mod n`, and
//!    to the CPU where that vCPU is. (The paper reads the CPU from the interrupt's
//!    posted descriptor, which a VMM in user space does not show.)
//! 3. For a device that is polled: the least loaded CPU. Load is first of all
//!    the number of requests that we have put there and that are unfinished,
//!    then how busy the CPU was lately, in tenths. Ties are broken in turn.

use pagetide_sys::cpu;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

/// How old measured load may get before it is measured again: the tick of `/proc/stat` is 10 ms.
const LOAD_MEASURED_EVERY: Duration = Duration::from_millis(500);

/// Where one vCPU is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VcpuPlace {
    /// CPUs that its thread may run on.
    pub allowed: Vec<usize>,
    /// CPU on which it last ran.
    pub last: Option<usize>,
}

impl VcpuPlace {
    /// Where its interrupts go: the CPU where it is or, if its affinity has changed since, the CPU
    /// to which it must move.
    fn interrupts(&self) -> Option<usize> {
        match (self.last, &*self.allowed) {
            (Some(last), allowed) if allowed.contains(&last) => Some(last),
            (_, [only]) => Some(*only),
            _ => None,
        }
    }
}

/// The CPUs of a tenant.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct TenantCpus {
    /// Ascending, each once.
    own: Vec<usize>,
    /// CPU that takes the interrupts of each vCPU, by the vCPU's number.
    interrupts: Vec<Option<usize>>,
}

/// How loaded a CPU is; the least is chosen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct CpuLoad {
    /// Requests of this tenant that were put there and are not finished.
    pub outstanding: usize,
    /// Tenths of its recent time that it was busy.
    pub busy_tenths: u8,
}

impl TenantCpus {
    /// The CPUs of a tenant with these vCPUs, in the order of their numbers, on a host with `host_cpus`
    /// CPUs. None if no vCPU is known.
    #[must_use]
    pub fn of_vcpus(vcpus: &[VcpuPlace], host_cpus: usize) -> Self {
        let sorted = |mut cpus: Vec<usize>| {
            cpus.sort_unstable();
            cpus.dedup();
            cpus
        };
        let all = vcpus.iter().flat_map(|vcpu| vcpu.allowed.iter().copied());
        let given = sorted(all.collect());
        let own = if given.len() < host_cpus {
            given
        } else {
            sorted(vcpus.iter().filter_map(VcpuPlace::interrupts).collect())
        };
        Self {
            own,
            interrupts: vcpus.iter().map(VcpuPlace::interrupts).collect(),
        }
    }

    /// A tenant whose vCPUs have one CPU of `cpus` each, in this order.
    #[must_use]
    pub fn dedicated(cpus: &[usize]) -> Self {
        let place = |cpu: &usize| VcpuPlace {
            allowed: vec![*cpu],
            last: Some(*cpu),
        };
        let vcpus: Vec<_> = cpus.iter().map(place).collect();
        Self::of_vcpus(&vcpus, usize::MAX)
    }

    /// The CPUs of the tenant, ascending; none if they are not known.
    #[must_use]
    pub fn own(&self) -> &[usize] {
        &self.own
    }

    /// Where a fault of a queue with this interrupt vector is handled, by the rules of the module;
    /// `None` if the tenant's CPUs are not known. `turn` is a number that grows with each fault.
    #[must_use]
    pub fn choose(
        &self,
        vector: Option<u16>,
        load: impl Fn(usize) -> CpuLoad,
        turn: usize,
    ) -> Option<usize> {
        vector
            .and_then(|vector| self.interrupted_by(vector))
            .or_else(|| self.least_loaded(load, turn))
    }

    fn interrupted_by(&self, vector: u16) -> Option<usize> {
        let vcpu = usize::from(vector).checked_rem(self.interrupts.len())?;
        self.interrupts[vcpu]
    }

    fn least_loaded(&self, load: impl Fn(usize) -> CpuLoad, turn: usize) -> Option<usize> {
        let loads: Vec<_> = self.own.iter().map(|cpu| (load(*cpu), *cpu)).collect();
        let least = loads.iter().map(|(load, _)| *load).min()?;
        let even: Vec<_> = loads.iter().filter(|(load, _)| *load == least).collect();
        let (_, cpu) = even[turn.checked_rem(even.len())?];
        Some(*cpu)
    }
}

/// How busy the CPUs of the host were lately. Readers never wait: the threads that report where vCPUs
/// are also measure.
#[derive(Debug, Default)]
pub(super) struct BusyTimes {
    busy_tenths: RwLock<HashMap<usize, u8>>,
    last: Mutex<Option<(Instant, HashMap<usize, Duration>)>>,
}

impl BusyTimes {
    /// How many tenths of its time `cpu` was busy; 0 if that is not known.
    pub(super) fn busy_tenths(&self, cpu: usize) -> u8 {
        let known = self
            .busy_tenths
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        known.get(&cpu).copied().unwrap_or(0)
    }

    /// Measures, unless it was done lately.
    pub(super) fn measure(&self) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let over = last.as_ref().map(|(at, _)| now.duration_since(*at));
        if over.is_some_and(|over| over < LOAD_MEASURED_EVERY) {
            return;
        }
        match cpu::idle_times() {
            Ok(idle) => {
                let idle: HashMap<_, _> = idle.into_iter().collect();
                if let Some((at, before)) = last.as_ref() {
                    self.take(before, &idle, now.duration_since(*at));
                }
                *last = Some((now, idle));
            }
            Err(error) => tracing::debug!(%error, "how busy the CPUs are cannot be told"),
        }
    }

    fn take(
        &self,
        before: &HashMap<usize, Duration>,
        idle: &HashMap<usize, Duration>,
        over: Duration,
    ) {
        let tenths = idle.iter().filter_map(|(cpu, idle)| {
            let was_idle = idle.saturating_sub(*before.get(cpu)?);
            Some((*cpu, busy_tenths(was_idle, over)))
        });
        *self
            .busy_tenths
            .write()
            .unwrap_or_else(PoisonError::into_inner) = tenths.collect();
    }
}

fn busy_tenths(was_idle: Duration, over: Duration) -> u8 {
    let busy = over.saturating_sub(was_idle);
    let tenths = (busy.as_millis() * 10 + over.as_millis() / 2).checked_div(over.as_millis());
    tenths.map_or(0, |tenths| u8::try_from(tenths.min(10)).unwrap_or(10))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vcpu(allowed: &[usize], last: usize) -> VcpuPlace {
        VcpuPlace {
            allowed: allowed.to_vec(),
            last: Some(last),
        }
    }

    const HOST: usize = 8;
    const ALL: [usize; HOST] = [0, 1, 2, 3, 4, 5, 6, 7];

    #[test]
    fn a_tenants_cpus_are_those_it_was_given_else_those_where_its_vcpus_are() {
        let own = |vcpus: &[VcpuPlace]| TenantCpus::of_vcpus(vcpus, HOST).own().to_vec();
        assert_eq!(own(&[]), Vec::<usize>::new());
        assert_eq!(own(&[vcpu(&[5], 5), vcpu(&[2], 2)]), [2, 5], "one each");
        let group = [2, 3, 4, 5];
        assert_eq!(own(&[vcpu(&group, 2), vcpu(&group, 2)]), group, "a group");
        let floating = [vcpu(&ALL, 6), vcpu(&ALL, 1), vcpu(&ALL, 6)];
        assert_eq!(own(&floating), [1, 6], "nobody gave it any");
    }

    /// The name of the case, vCPUs, vector, how many requests are outstanding and how many tenths
    /// are busy by CPU, and the choices at turns 0, 1, 2.
    type Case<'a> = (
        &'a str,
        Vec<VcpuPlace>,
        Option<u16>,
        [usize; HOST],
        [u8; HOST],
        [usize; 3],
    );

    const NONE: [usize; HOST] = [0; HOST];
    const IDLE: [u8; HOST] = [0; HOST];

    fn pinned() -> Vec<VcpuPlace> {
        vec![vcpu(&[4], 4), vcpu(&[6], 6), vcpu(&[7], 7)]
    }

    fn group() -> Vec<VcpuPlace> {
        vec![vcpu(&[2, 3], 3), vcpu(&[2, 3], 2)]
    }

    /// The masks were changed since the vCPUs last ran.
    fn moved() -> Vec<VcpuPlace> {
        vec![vcpu(&[2, 3], 7), vcpu(&[5], 1)]
    }

    fn check(table: &[Case<'_>]) {
        for (what, vcpus, vector, outstanding, busy, choices) in table {
            let cpus = TenantCpus::of_vcpus(vcpus, HOST);
            let load = |cpu: usize| CpuLoad {
                outstanding: outstanding[cpu],
                busy_tenths: busy[cpu],
            };
            let chosen = [0, 1, 2].map(|turn| cpus.choose(*vector, load, turn));
            assert_eq!(chosen, choices.map(Some), "{what}");
        }
    }

    #[test]
    fn where_nobody_knows_the_vcpus_nothing_is_chosen() {
        let cpus = TenantCpus::of_vcpus(&[], HOST);
        for vector in [None, Some(0), Some(u16::MAX)] {
            assert_eq!(cpus.choose(vector, |_| CpuLoad::default(), 0), None);
        }
    }

    #[test]
    fn fault_of_a_queue_with_interrupts_goes_where_they_go() {
        let case = |what, vcpus, vector, choice| -> Case<'_> {
            (what, vcpus, Some(vector), NONE, IDLE, [choice; 3])
        };
        let loaded = [9; HOST];
        check(&[
            case("vector", pinned(), 1, 6),
            case("more vectors than vCPUs", pinned(), 5, 7),
            (
                "a loaded CPU",
                pinned(),
                Some(0),
                loaded,
                [10; HOST],
                [4; 3],
            ),
            case("a vCPU that floats in its group", group(), 0, 3),
            case("a vCPU that must come to its CPU", moved(), 1, 5),
            (
                "a vCPU that may come to several: by load",
                moved(),
                Some(0),
                NONE,
                IDLE,
                [2, 3, 5],
            ),
        ]);
    }

    #[test]
    fn fault_of_a_polled_queue_goes_where_the_tenant_has_least_to_do() {
        let case = |what, vcpus, outstanding, busy, choices| -> Case<'_> {
            (what, vcpus, None, outstanding, busy, choices)
        };
        let own_work = [0, 0, 0, 0, 1, 0, 1, 0];
        check(&[
            case("even: in turn", pinned(), NONE, IDLE, [4, 6, 7]),
            case("own work", pinned(), own_work, IDLE, [7; 3]),
            case(
                "own work goes before measured load",
                pinned(),
                own_work,
                [0, 0, 0, 0, 0, 0, 0, 10],
                [7; 3],
            ),
            case(
                "measured load",
                pinned(),
                NONE,
                [0, 0, 0, 0, 9, 0, 2, 2],
                [6, 7, 6],
            ),
            case(
                "other tenants' idle CPUs do not count",
                group(),
                [0, 0, 5, 5, 0, 0, 0, 0],
                [0, 0, 10, 10, 0, 0, 0, 0],
                [2, 3, 2],
            ),
        ]);
    }

    #[test]
    fn busy_time_is_what_was_not_idle_in_tenths() {
        let ms = Duration::from_millis;
        for (idle, over, tenths) in [
            (500, 500, 0),
            (0, 500, 10),
            (900, 500, 0),
            (250, 500, 5),
            (0, 0, 0),
        ] {
            assert_eq!(busy_tenths(ms(idle), ms(over)), tenths, "{idle} of {over}");
        }
        let times = BusyTimes::default();
        let (before, after) = (HashMap::from([(3, ms(100))]), HashMap::from([(3, ms(300))]));
        times.take(&before, &after, ms(1_000));
        assert_eq!((times.busy_tenths(3), times.busy_tenths(4)), (8, 0));
    }
}
