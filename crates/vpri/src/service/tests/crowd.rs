// SPDX-License-Identifier: Apache-2.0
//! Random tenants and arrivals: against a naive model of which worker has what, and with
//! threads.

use super::{
    super::*,
    rig::{Device, PAGES, Rig, Vm},
};
use pagetide_addr::PageRequest;
use proptest::{prelude::*, test_runner::Config};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// CPUs by number; this machine need not have them, since a worker that cannot be moved stays.
const CPUS: usize = 6;
const TENANTS: usize = 3;

#[derive(Clone, Debug)]
enum Step {
    /// A fault of a tenant's queue.
    Fault(usize, Option<u16>),
    /// All requests of a tenant are finished.
    Finish(usize),
    /// A tenant's vCPUs have moved.
    Move(usize, Vec<usize>),
}

fn step() -> impl Strategy<Value = Step> {
    let cpus = proptest::collection::vec(0..CPUS, 0..5);
    prop_oneof![
        6 => (0..TENANTS, proptest::option::of(0_u16..9)).prop_map(|(t, v)| Step::Fault(t, v)),
        1 => (0..TENANTS).prop_map(Step::Finish),
        1 => (0..TENANTS, cpus).prop_map(|(t, cpus)| Step::Move(t, cpus)),
    ]
}

/// The expected load of a tenant.
#[derive(Default)]
struct Expected {
    vcpus: Vec<usize>,
    load: [usize; CPUS],
    elsewhere: usize,
    turn: usize,
}

impl Expected {
    fn fault(&mut self, vector: Option<u16>) {
        let mut own = self.vcpus.clone();
        own.sort_unstable();
        own.dedup();
        let turn = self.turn;
        self.turn += usize::from(vector.is_none());
        if own.is_empty() {
            self.elsewhere += 1;
            return;
        }
        let cpu = match vector {
            Some(vector) => self.vcpus[usize::from(vector) % self.vcpus.len()],
            None => {
                let least = own.iter().map(|cpu| self.load[*cpu]).min().unwrap();
                own.retain(|cpu| self.load[*cpu] == least);
                own[turn % own.len()]
            }
        };
        self.load[cpu] += 1;
    }

    fn outstanding(&self) -> usize {
        self.load.iter().sum::<usize>() + self.elsewhere
    }
}

fn run(steps: Vec<Step>) {
    let rig = Rig::still(Handling::Affined);
    let tenants: [_; TENANTS] = std::array::from_fn(|_| rig.vm());
    let mut expected: [Expected; TENANTS] = std::array::from_fn(|_| Expected::default());
    let mut next_page = [0; TENANTS];
    // Without room, no request ends by itself.
    tenants.iter().for_each(|(vm, _)| vm.rooms.fill_up());
    for step in steps {
        match step {
            Step::Fault(index, vector) => {
                let vm = &tenants[index].0;
                rig.device.ask(PageRequest {
                    vector,
                    ..Device::demand(vm, next_page[index])
                });
                next_page[index] += 1;
                expected[index].fault(vector);
                rig.service.take_in_all();
            }
            Step::Finish(index) => {
                let (vm, tenant) = &tenants[index];
                vm.rooms.make_room();
                let outstanding = expected[index].outstanding();
                for _ in 0..outstanding {
                    rig.device.answer();
                }
                (0..CPUS).for_each(|cpu| tenant.wait_for_load_of(cpu, 0));
                vm.rooms.fill_up();
                expected[index] = Expected {
                    vcpus: expected[index].vcpus.clone(),
                    turn: expected[index].turn,
                    ..Expected::default()
                };
            }
            Step::Move(index, cpus) => {
                tenants[index].1.set_cpus(TenantCpus::dedicated(&cpus));
                expected[index].vcpus = cpus;
            }
        }
        for ((_, tenant), expected) in tenants.iter().zip(&expected) {
            let outstanding = expected.outstanding() as u64;
            assert_eq!(tenant.account().outstanding(), outstanding);
            let loads: [_; CPUS] = std::array::from_fn(|cpu| tenant.load_of(cpu));
            assert_eq!(loads, expected.load);
        }
    }
    tenants.iter().for_each(|(vm, _)| vm.rooms.make_room());
}

proptest! {
    #![proptest_config(Config { cases: 64, ..Config::default() })]

    #[test]
    fn what_is_outstanding_where_is_as_a_naive_model_has_it(
        steps in proptest::collection::vec(step(), 1..60)
    ) {
        run(steps);
    }
}

/// Requests of each kind and delay, in a fixed pseudo-random order.
fn asks(device: &Device, vms: &[Vm], count: u64) {
    for number in 0..count {
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let vm = &vms[usize::try_from(mixed % 4).unwrap() % vms.len()];
        let page = mixed / 4 % (PAGES + 1);
        let request = match mixed / 64 % 8 {
            0 => Device::prefault(vm, page),
            1 => PageRequest {
                hold_us: 50,
                ..Device::demand(vm, page)
            },
            kind => PageRequest {
                vector: u16::try_from(kind).ok().filter(|kind| kind % 2 == 0),
                ..Device::demand(vm, page)
            },
        };
        device.ask(request);
        // A device has no more outstanding requests than its queue holds.
        while device.waiting() > 32 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn every_request_gets_one_answer_while_tenants_come_and_go() {
    const ASKED: u64 = 4_000;
    for handling in [Handling::Affined, Handling::Serialized] {
        let rig = Rig::started(handling);
        let vms: [_; 3] = std::array::from_fn(|_| Vm::new(&rig.domains));
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for vm in &vms[..2] {
                let (service, over) = (&rig.service, &over);
                scope.spawn(move || {
                    while !over.load(SeqCst) {
                        let tenant = vm.join(service);
                        tenant.set_cpus(TenantCpus::dedicated(&[0, 1]));
                        while tenant.requests() < 40 && !over.load(SeqCst) {
                            std::thread::yield_now();
                        }
                        service.remove_tenant(&tenant);
                        service.release(&vm.mmu.domains());
                    }
                });
            }
            // The third never belongs to a tenant.
            asks(&rig.device, &vms, ASKED);
            // The device notices an answer that comes twice, or that it did not request.
            for _ in 0..ASKED {
                rig.device.answer();
            }
            over.store(true, SeqCst);
        });
        assert_eq!(rig.device.answer_now(), None);
    }
}
