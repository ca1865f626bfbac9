// SPDX-License-Identifier: Apache-2.0
//! The service as a whole: with memory that is a map, and devices that only
//! send requests.

mod crowd;
mod rig;

use self::rig::{BOUNCED, Device, PAGES, Rig, Vm};
use super::*;
use crate::{domain::DomainTable, queue::fault_queue};
use pagetide_addr::{
    Access, FilePage, FileRange, PAGE_BYTES, PageNo, PageRequest, QueueId, RequestId, RequestKind,
    ResponseCode, Tier,
};
use pagetide_sys::clock::now_ns;
use pagetide_sys::{cpu, memory_file::GuestFile};

/// An hour: no test waits that long.
const FOR_EVER_US: u32 = 3_600_000_000;
const FILE_BYTES: u64 = 4 * PAGE_BYTES;

fn bell() -> Arc<Doorbell> {
    Arc::new(Doorbell::new().unwrap())
}

#[test]
fn requests_for_a_retired_domain_are_refused_those_held_before_and_those_that_come_later() {
    let (device, host) = fault_queue(4, bell(), bell());
    let service = FaultService::new(vec![host], bell());
    let table = DomainTable::new(1);
    let file = GuestFile::new_memfd("retired", FILE_BYTES).unwrap();
    let open = || table.open(file.key().unwrap(), FILE_BYTES);
    let domain = open().unwrap();
    let ask = |id: u64| {
        let (queue, page) = (QueueId(0), FilePage(0).single());
        let request =
            PageRequest::demand(RequestId(id), DPU, queue, domain.id(), page, Access::Read);
        device.submit(request).unwrap();
        assert!(service.assist(0));
        device.next().map(|response| response.code)
    };
    assert_eq!(ask(1), Some(ResponseCode::Success), "nobody's: read-write");
    let space = Arc::clone(&domain) as Arc<dyn IoSpace>;
    service.hold(std::slice::from_ref(&space));
    assert_eq!(ask(2), None, "held");
    service.refuse(&space);
    table.retire(&domain);
    let refused = Some(ResponseCode::InvalidRequest);
    assert_eq!(device.next().map(|response| response.code), refused);
    assert_eq!(ask(3), refused);
    let bitmap = domain.attributes().bitmap();
    assert!(!bitmap.allows(FilePage(0).single(), Access::Read));
    // The file opened again is another domain, and shares nothing with the old one.
    let again = open().unwrap();
    assert_ne!(again.id(), domain.id());
    let bitmap = again.attributes().bitmap();
    assert!(bitmap.allows(FilePage(0).single(), Access::Write));
}

#[test]
fn demand_is_served_on_the_interrupts_cpu_and_its_answer_tells_tier_and_times() {
    let rig = Rig::started(Handling::Affined);
    let (vm, tenant) = rig.vm();
    for cpu in cpu::affinity().unwrap() {
        tenant.set_cpus(TenantCpus::dedicated(&[cpu]));
        let page = cpu as u64;
        let request = PageRequest {
            vector: Some(3),
            sent_ns: now_ns() - 1_000_000,
            ..Device::demand(&vm, page)
        };
        rig.device.ask(request);
        let answer = rig.device.answer();
        assert_eq!(
            (answer.code, answer.tier),
            (ResponseCode::Success, Tier::Zero)
        );
        assert!(answer.waited_ns >= 1_000_000 && answer.handling_ns > 0);
        assert!(vm.is_granted(page));
        assert_eq!(vm.filled_on(page), cpu);
        rig.device.ask(request);
        let again = rig.device.answer();
        assert_eq!(
            (again.code, again.tier),
            (ResponseCode::Success, Tier::Present)
        );
    }
    let account = tenant.account();
    let recorded = account.iopf.histogram_ns();
    assert_eq!(recorded.len(), account.requests());
    assert!(recorded.min() >= 990_000, "from its sending");
    assert_eq!(account.outstanding(), 0);
}

#[test]
fn fault_that_waits_for_room_keeps_neither_other_tenants_nor_other_cpus_waiting() {
    let rig = Rig::started(Handling::Affined);
    let ((vm, tenant), (other, _)) = (rig.vm(), rig.vm());
    tenant.set_cpus(TenantCpus::dedicated(&[0, 1]));
    let at = |vector, page| PageRequest {
        vector: Some(vector),
        ..Device::demand(&vm, page)
    };
    rig.device.ask(at(1, 10));
    assert_eq!(rig.device.answer().code, ResponseCode::Success);
    vm.rooms.fill_up();
    let waits = rig.device.ask(at(0, 1));
    vm.rooms.wait_for_waiting(1);
    let there = rig.device.ask(at(1, 10));
    assert_eq!(rig.device.answer().id, there, "present, on another CPU");
    let elsewhere = rig.device.ask(Device::demand(&other, 1));
    assert_eq!(rig.device.answer().id, elsewhere);
    assert_eq!(tenant.account().outstanding(), 1);
    vm.rooms.make_room();
    assert_eq!(rig.device.answer().id, waits);
}

#[test]
fn serialized_service_answers_in_the_order_of_arrival_and_waits_where_a_fault_waits() {
    let rig = Rig::started(Handling::Serialized);
    let ((vm, _), (other, tenant)) = (rig.vm(), rig.vm());
    vm.rooms.fill_up();
    let requests = [
        Device::demand(&vm, 1),
        Device::prefault(&other, 1),
        Device::demand(&other, 2),
    ];
    let asked = requests.map(|request| rig.device.ask(request));
    vm.rooms.wait_for_waiting(1);
    while tenant.account().outstanding() < 2 {
        std::thread::yield_now();
    }
    assert_eq!(rig.device.answer_now(), None);
    assert!(!rig.service.assist(0), "no engine serves beside it");
    vm.rooms.make_room();
    assert_eq!(asked.map(|_| rig.device.answer().id), asked);
}

#[test]
fn prefault_comes_after_demands_and_is_dropped_where_it_would_have_to_wait() {
    let rig = Rig::started(Handling::Affined);
    let (vm, tenant) = rig.vm();
    vm.rooms.fill_up();
    let first = rig.device.ask(Device::demand(&vm, 1));
    vm.rooms.wait_for_waiting(1);
    let prefault = rig.device.ask(Device::prefault(&vm, 2));
    let demand = rig.device.ask(Device::demand(&vm, 3));
    while tenant.account().outstanding() < 3 {
        std::thread::yield_now();
    }
    vm.rooms.make_room();
    let order = [first, demand, prefault];
    assert_eq!(order.map(|_| rig.device.answer().id), order);
    assert!(vm.is_granted(2));
    vm.rooms.fill_up();
    rig.device.ask(Device::prefault(&vm, 4));
    assert_eq!(rig.device.answer().code, ResponseCode::Success);
    assert!(!vm.is_granted(4));
    let account = tenant.account();
    assert_eq!((account.prefaults(), account.dropped_prefaults()), (2, 1));
    assert_eq!(account.requests(), 4);
}

#[test]
fn prefault_of_many_pages_brings_the_first_64_and_is_answered() {
    let rig = Rig::started(Handling::Affined);
    let (vm, tenant) = rig.vm();
    let request = PageRequest {
        pages: FileRange::new(FilePage(3), FilePage(3 + 300)),
        ..Device::prefault(&vm, 0)
    };
    rig.device.ask(request);
    assert_eq!(rig.device.answer().code, ResponseCode::Success);
    assert!(vm.place.present().into_iter().eq((3..67).map(PageNo)));
    assert_eq!(tenant.account().dropped_prefaults(), 0, "it is done");
}

#[test]
fn overwrite_installs_what_the_device_has_written_and_tells_where() {
    let rig = Rig::started(Handling::Affined);
    let (vm, _tenant) = rig.vm();
    rig.device.ask(Device::demand(&vm, 6));
    assert_eq!(rig.device.answer().code, ResponseCode::Success);
    let overwrite = |slot, first, count| PageRequest {
        kind: RequestKind::Overwrite { slot },
        pages: FileRange::new(FilePage(first), FilePage(first + count)),
        ..Device::demand(&vm, 0)
    };
    rig.device.ask(overwrite(0, 5, 3));
    let answer = rig.device.answer();
    assert_eq!(
        (answer.code, answer.installed),
        (ResponseCode::Success, 0b101)
    );
    let bytes = [5, 6, 7].map(|page| vm.place.first_byte(PageNo(page)));
    assert_eq!(bytes, [Some(BOUNCED), Some(0), Some(BOUNCED)]);
    // A slot that does not exist, and more pages than one word covers.
    for senseless in [overwrite(1, 20, 1), overwrite(0, 20, 65)] {
        rig.device.ask(senseless);
        let answer = rig.device.answer();
        assert_eq!(
            (answer.code, answer.installed),
            (ResponseCode::InvalidRequest, 0)
        );
    }
    vm.rooms.fill_up();
    rig.device.ask(overwrite(0, 30, 2));
    vm.rooms.wait_for_waiting(1);
    vm.rooms.make_room();
    assert_eq!(rig.device.answer().installed, 0b11);
}

#[test]
fn overwrite_whose_device_goes_while_it_waits_for_room_installs_nothing() {
    let rig = Rig::started(Handling::Affined);
    let (vm, _tenant) = rig.vm();
    vm.rooms.fill_up();
    rig.device.ask(PageRequest {
        kind: RequestKind::Overwrite { slot: 0 },
        pages: FileRange::new(FilePage(30), FilePage(32)),
        ..Device::demand(&vm, 0)
    });
    vm.rooms.wait_for_waiting(1);
    rig.device.go();
    vm.rooms.make_room();
    let answer = rig.device.answer();
    assert_eq!(
        (answer.code, answer.installed),
        (ResponseCode::ResponseFailure, 0)
    );
    assert!(vm.place.present().is_empty());
}

#[test]
fn pages_beyond_the_memory_are_refused() {
    let rig = Rig::started(Handling::Affined);
    let (vm, _tenant) = rig.vm();
    for kind in [
        RequestKind::Demand,
        RequestKind::Prefault,
        RequestKind::AliasFault,
    ] {
        let request = PageRequest {
            kind,
            ..Device::demand(&vm, PAGES)
        };
        rig.device.ask(request);
        assert_eq!(rig.device.answer().code, ResponseCode::InvalidRequest);
    }
}

#[test]
fn alias_faults_are_served_and_counted_apart() {
    let rig = Rig::started(Handling::Affined);
    let (vm, tenant) = rig.vm();
    let request = PageRequest {
        kind: RequestKind::AliasFault,
        ..Device::demand(&vm, 1)
    };
    rig.device.ask(request);
    assert_eq!(rig.device.answer().code, ResponseCode::Success);
    assert_eq!((tenant.alias_faults(), tenant.requests()), (1, 0));
}

#[test]
fn fault_on_pages_that_are_away_is_what_an_access_waits_for_and_no_guess() {
    let rig = Rig::started(Handling::Affined);
    let (vm, tenant) = rig.vm();
    let all = PageNo(0).run(PAGES);
    let counted = |kind, tier| {
        let before = tenant.absent_faults();
        let demand = Device::demand(&vm, 1);
        tenant
            .vm()
            .note_fault(&PageRequest { kind, ..demand }, all, tier);
        let sections = std::iter::from_fn(|| tenant.next_absent_section()).count();
        (tenant.absent_faults() - before, sections)
    };
    let overwrite = RequestKind::Overwrite { slot: 0 };
    for (kind, expected) in [
        (RequestKind::Demand, (1, 2)),
        (overwrite, (1, 2)),
        (RequestKind::Prefault, (0, 0)),
        (RequestKind::AliasFault, (0, 0)),
    ] {
        assert_eq!(counted(kind, Tier::Zero), expected, "{kind:?}");
        assert_eq!(counted(kind, Tier::Present), (0, 0), "{kind:?}");
    }
}

#[test]
fn held_answer_comes_no_sooner_than_asked_and_keeps_nobody_elses() {
    for handling in [Handling::Affined, Handling::Serialized] {
        let rig = Rig::started(handling);
        let (vm, _tenant) = rig.vm();
        let nobodys = Vm::new(&rig.domains);
        for whose in [&vm, &nobodys] {
            let request = PageRequest {
                hold_us: 2_000,
                ..Device::demand(whose, 1)
            };
            rig.device.ask(request);
            assert!(rig.device.answer().handling_ns >= 2_000_000);
        }
        if handling == Handling::Affined {
            let for_ever = PageRequest {
                hold_us: FOR_EVER_US,
                ..Device::demand(&nobodys, 1)
            };
            rig.device.ask(for_ever);
            let quick = rig.device.ask(Device::demand(&nobodys, 2));
            assert_eq!(rig.device.answer().id, quick);
        }
    }
}

#[test]
fn tenant_that_leaves_ends_an_injected_delay_and_its_request_is_held_until_its_release() {
    for handling in [Handling::Affined, Handling::Serialized] {
        let rig = Rig::started(handling);
        let (vm, tenant) = rig.vm();
        let for_ever = |page| PageRequest {
            hold_us: FOR_EVER_US,
            ..Device::demand(&vm, page)
        };
        let asked = [for_ever(1), for_ever(2)].map(|request| rig.device.ask(request));
        while tenant.account().outstanding() < 2 {
            std::thread::yield_now();
        }
        rig.service.remove_tenant(&tenant);
        while tenant.account().outstanding() > 0 {
            std::thread::yield_now();
        }
        assert_eq!(rig.device.answer_now(), None);
        rig.service.release(&vm.mmu.domains());
        let answers = asked.map(|_| rig.device.answer());
        assert_eq!(
            answers.map(|answer| answer.code),
            [ResponseCode::Success; 2]
        );
        assert!(!vm.is_granted(1));
    }
}

#[test]
fn ram_that_is_plugged_in_again_as_the_same_file_is_nobodys_then_held_then_served() {
    let rig = Rig::started(Handling::Affined);
    let (vm, tenant) = rig.vm();
    let domains = vm.mmu.domains();
    let ask = |page| rig.device.ask(Device::demand(&vm, page));
    let is_fine = |asked: RequestId| {
        let answer = rig.device.answer();
        assert_eq!((answer.id, answer.code), (asked, ResponseCode::Success));
    };
    // Unplugged, as in `host/hotplug.rs`.
    rig.service.withhold(&domains);
    let early = ask(1);
    while rig.device.waiting() > 0 {
        std::thread::yield_now();
    }
    vm.mmu.remove(domains[0].id());
    rig.service.release(&domains);
    is_fine(early);
    is_fine(ask(2));
    assert!(!vm.is_granted(1) && !vm.is_granted(2), "it is nobody's");
    // And plugged in again.
    rig.service.hold(&domains);
    let held = ask(3);
    while rig.device.waiting() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(rig.device.answer_now(), None);
    vm.mmu.add(&domains[0], PageNo(0).run(PAGES));
    rig.service.serve_domains(&tenant, &domains);
    is_fine(held);
    assert!(vm.is_granted(3));
}

#[test]
fn domain_that_was_held_in_vain_stays_its_tenants_after_the_release() {
    let rig = Rig::started(Handling::Affined);
    let (vm, _tenant) = rig.vm();
    let domains = vm.mmu.domains();
    rig.service.hold(&domains);
    rig.service.release(&domains);
    rig.device.ask(Device::demand(&vm, 1));
    assert_eq!(rig.device.answer().code, ResponseCode::Success);
    assert!(vm.is_granted(1));
}

#[test]
fn sources_come_and_go_while_the_dispatcher_sleeps() {
    let rig = Rig::started(Handling::Affined);
    let (vm, _tenant) = rig.vm();
    let late = Device::new(&rig.bell);
    late.ask(Device::demand(&vm, 1));
    let id = rig.service.add_source(Arc::clone(&late) as _);
    assert_eq!(late.answer().code, ResponseCode::Success);
    rig.service.remove_source(id);
    late.ask(Device::demand(&vm, 2));
    // A request of another source overtakes it.
    rig.device.ask(Device::demand(&vm, 3));
    assert_eq!(rig.device.answer().code, ResponseCode::Success);
    assert_eq!((late.waiting(), late.answer_now()), (1, None));
}

#[test]
fn source_that_was_removed_still_gets_answers_to_what_was_taken() {
    let rig = Rig::started(Handling::Affined);
    let (vm, _tenant) = rig.vm();
    vm.rooms.fill_up();
    rig.device.ask(Device::demand(&vm, 1));
    vm.rooms.wait_for_waiting(1);
    rig.service.remove_source(rig.source);
    vm.rooms.make_room();
    assert_eq!(rig.device.answer().code, ResponseCode::Success);
}

#[test]
fn engine_serves_its_own_demands_and_leaves_what_must_wait_to_a_worker() {
    let (device, host) = fault_queue(8, bell(), bell());
    let service = FaultService::new(vec![host], bell());
    let vm = Vm::new(&DomainTable::new(1));
    let tenant = vm.join(&service);
    let ask = |id: u64, request: PageRequest| {
        let id = RequestId(id);
        device.submit(PageRequest { id, ..request }).unwrap();
        assert!(service.assist(0));
    };
    ask(1, Device::demand(&vm, 1));
    assert_eq!(device.next().unwrap().tier, Tier::Zero);
    vm.rooms.fill_up();
    ask(2, Device::demand(&vm, 2));
    vm.rooms.wait_for_waiting(1);
    assert_eq!(device.next(), None);
    vm.rooms.make_room();
    let hold = PageRequest {
        hold_us: 1_000,
        ..Device::demand(&vm, 1)
    };
    ask(3, hold);
    ask(4, Device::prefault(&vm, 4));
    let answer = || {
        loop {
            match device.next() {
                Some(answer) => return answer.id.0,
                None => std::thread::yield_now(),
            }
        }
    };
    assert_eq!([(); 3].map(|()| answer()), [2, 3, 4]);
    assert_eq!(tenant.account().requests(), 4);
}

#[test]
fn engine_that_is_not_to_serve_leaves_its_demands_to_workers_on_the_tenants_cpus() {
    let (device, host) = fault_queue(8, bell(), bell());
    let config = ServiceConfig {
        idle_engines: IdleEngines::Leave,
        ..ServiceConfig::default()
    };
    let service = FaultService::with(config, vec![host], bell());
    let vm = Vm::new(&DomainTable::new(1));
    let tenant = vm.join(&service);
    for cpu in cpu::affinity().unwrap() {
        tenant.set_cpus(TenantCpus::dedicated(&[cpu]));
        let page = cpu as u64;
        device.submit(Device::demand(&vm, page)).unwrap();
        assert!(!service.assist(0), "it is the service's");
        assert_eq!(device.next(), None);
        service.take_in_all();
        while device.next().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(vm.filled_on(page), cpu);
    }
}

#[test]
fn engine_serves_few_pages_a_call_and_leaves_what_is_over_to_workers() {
    let (device, host) = fault_queue(64, bell(), bell());
    let service = FaultService::new(vec![host], bell());
    let vm = Vm::new(&DomainTable::new(1));
    let _tenant = vm.join(&service);
    let demand = |id: u64, pages: std::ops::Range<u64>| PageRequest {
        id: RequestId(id),
        pages: FileRange::new(FilePage(pages.start), FilePage(pages.end)),
        ..Device::demand(&vm, 0)
    };
    for page in 0..40 {
        device.submit(demand(page, page..page + 1)).unwrap();
    }
    for done in [16, 32] {
        assert!(!service.assist(0), "some are left");
        assert_eq!(vm.place.present_pages(), done);
    }
    assert!(service.assist(0));
    assert_eq!(vm.place.present_pages(), 40);
    let answers = std::iter::from_fn(|| device.next());
    assert!(answers.map(|answer| answer.id.0).eq(0..40));
    // At least one request, however large.
    device.submit(demand(50, 100..150)).unwrap();
    device.submit(demand(51, 200..201)).unwrap();
    assert!(!service.assist(0));
    assert_eq!(device.next().map(|answer| answer.id.0), Some(50));
    // The larger one that is left goes to a worker.
    device.submit(demand(52, 300..350)).unwrap();
    device.submit(demand(53, 400..401)).unwrap();
    assert!(!service.assist(0));
    assert!(device.outstanding() > 0);
    let mut answered = vec![];
    while answered.len() < 2 {
        answered.extend(std::iter::from_fn(|| device.next()).map(|answer| answer.id.0));
    }
    answered.sort_unstable();
    assert_eq!(answered, [51, 52]);
    assert!(!vm.place.has(PageNo(400)), "nobody took it");
}

#[test]
fn duty_that_is_dropped_answers_itself_with_a_failure() {
    let rig = Rig::still(Handling::Affined);
    let (vm, tenant) = rig.vm();
    let source = Arc::clone(&rig.device) as Arc<dyn FaultSource>;
    rig.device.ask(Device::demand(&vm, 1));
    let request = source.next().unwrap();
    let mut duty = Duty::new(request, &source);
    duty.open_for(tenant.vm());
    assert_eq!(tenant.account().outstanding(), 1);
    drop(duty);
    assert_eq!(rig.device.answer().code, ResponseCode::ResponseFailure);
    assert_eq!(tenant.account().outstanding(), 0);
}

#[test]
fn worker_whose_queue_ended_for_want_of_work_is_replaced_by_another() {
    let rig = Rig::still(Handling::Affined);
    let (vm, tenant) = rig.vm();
    tenant.set_cpus(TenantCpus::dedicated(&[0]));
    for page in 0..2 {
        rig.device.ask(Device::demand(&vm, page));
        rig.service.take_in_all();
        assert_eq!(rig.device.answer().code, ResponseCode::Success);
        // As after its idle timeout.
        tenant.close_worker_of(0);
    }
    let queue = Queue::new(Order::DemandsFirst);
    assert!(queue.next(Some(Duration::ZERO)).is_none());
    let source = Arc::clone(&rig.device) as Arc<dyn FaultSource>;
    rig.device.ask(Device::demand(&vm, 9));
    let duty = Duty::new(source.next().unwrap(), &source);
    let refused = queue.push(duty);
    refused.unwrap_err().answer(FaultOutcome::Present);
}
