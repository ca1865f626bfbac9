// SPDX-License-Identifier: Apache-2.0
//! What each message is held to, whatever the bytes: no panic, one meaning, and a refusal that says
//! where; and what a device is held to, whatever its drivers and engines do.

use pagetide_addr::{
    Access, DeviceId, DomainId, FileKey, FilePage, PAGE_BYTES, PageRequest, PageResponse, QueueId,
    RequestId, RequestKind,
};
use pagetide_vpri::DomainTable;
use pagetide_vpri_function::{
    function::{DeviceSide, FunctionCore, Phase, SourceNo},
    wire::{
        Code, Config, Event, LogEntry, Opcode, PAGES_MAX, REQUEST_BYTES, Reply, decode_request,
        encode_request, request_id,
    },
};
use std::{collections::HashMap, sync::Arc};

/// A message of the event queue.
pub fn event(bytes: &[u8]) {
    match Event::decode(bytes) {
        Ok(event) => {
            let mut again = Vec::new();
            event.encode(&mut again);
            assert_eq!(again.len(), bytes.len());
            assert_eq!(Event::decode(&again).as_ref(), Ok(&event));
            // A tier that is not known is written as the one number for it.
            if event.opcode() != Opcode::Respond {
                assert_eq!(again, bytes);
            }
        }
        Err(error) => {
            let status = error.status();
            assert!(matches!(status.code, Code::Invalid | Code::Unsupported));
            assert!(error.at() <= bytes.len().max(32));
        }
    }
}

/// A page request.
pub fn request(bytes: &[u8]) {
    match decode_request(bytes) {
        Ok(request) => {
            assert!(!request.pages.is_empty() && request.pages.end.0 <= PAGES_MAX);
            assert_eq!(request_id(bytes), Some(request.id));
            assert_eq!(decode_request(&encode_request(&request)), Ok(request));
        }
        Err(error) => assert!(error.at() < REQUEST_BYTES || bytes.len() < REQUEST_BYTES),
    }
}

/// A status, with or without a mask.
pub fn reply(bytes: &[u8]) {
    if let Ok(reply) = Reply::decode(bytes) {
        let again = reply.encode();
        assert_eq!(again.len(), bytes.len());
        assert_eq!(Reply::decode(&again), Ok(reply));
    }
}

/// The configuration space.
pub fn config(bytes: &[u8]) {
    if let Ok(config) = Config::decode(bytes) {
        assert_eq!(Config::decode(&config.encode()), Ok(config));
    }
}

/// A record of the access log.
pub fn record(bytes: &[u8]) {
    if let Ok(entry) = LogEntry::decode(bytes) {
        assert_eq!(LogEntry::decode(&entry.encode()), Ok(entry));
    }
}

/// A device, through any drivers: every request is answered exactly once in the end.
pub fn session(bytes: &[u8]) {
    let mut device = Device::new();
    let mut bytes = Bytes(bytes);
    while let Some(what) = bytes.next() {
        match what % 8 {
            0 => device.core.hang_up(&mut device.engines),
            1 => device.fault(&mut bytes),
            2 => device.bring(&mut bytes),
            3 => while device.core.next_unsent().is_some() {},
            4 => device.tell(&raw(&mut bytes)),
            _ => device.tell(&likely(&mut bytes)),
        }
        device.check();
    }
    // A driver that pages nothing.
    device.say(&Event::Begin);
    device.say(&Event::Ready);
    assert_eq!(device.core.outstanding(), 0);
    assert!(device.engines.open.values().all(|open| !open));
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn small(&mut self, limit: u8) -> u8 {
        self.next().unwrap_or(0) % limit
    }
}

/// Bytes as they come, of a length that they say.
fn raw(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let len = bytes.small(120);
    (0..len).map_while(|_| bytes.next()).collect()
}

/// A message of small numbers, so that it often means something.
fn likely(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let opcode = u16::from(bytes.small(16));
    let flags = u16::from(bytes.small(4));
    let is_answer = opcode == Opcode::Respond as u16;
    let named = [Opcode::Create as u16, Opcode::Bar as u16].contains(&opcode);
    let space = if named || is_answer {
        0
    } else {
        bytes.small(4)
    };
    let has_body = opcode <= Opcode::Invalidate as u16 || is_answer;
    let count = if has_body {
        1 + bytes.small(2)
    } else {
        bytes.small(2)
    };
    let mut message = Vec::new();
    message.extend(opcode.to_le_bytes());
    message.extend(flags.to_le_bytes());
    message.extend(u32::from(space).to_le_bytes());
    message.extend(u32::from(count).to_le_bytes());
    message.extend([0; 4]);
    let arg = |number: u8| u64::from(number).to_le_bytes();
    message.extend(arg(0));
    message.extend(arg(if named { bytes.small(3) } else { 0 }));
    for _ in 0..count {
        message.extend(arg(bytes.small(8)));
        message.extend(arg(if is_answer { 0 } else { bytes.small(9) }));
        if is_answer {
            message.extend([0; 24]);
        }
    }
    message
}

/// Whether each request that was asked still waits.
#[derive(Default)]
struct Engines {
    open: HashMap<u64, bool>,
}

impl DeviceSide for Engines {
    fn respond(&mut self, _source: SourceNo, response: PageResponse) {
        let open = self.open.insert(response.id.0, false);
        assert_eq!(open, Some(true), "answered once");
    }

    fn land(&mut self, _area: Option<(u64, u64)>) -> Result<(), Code> {
        Ok(())
    }

    fn is_bounce(&self, slot: u32, _count: u64) -> bool {
        slot.is_multiple_of(2)
    }
}

struct Device {
    core: FunctionCore,
    table: Arc<DomainTable>,
    engines: Engines,
    /// Memory that I/O devices have.
    brought: Vec<Arc<pagetide_vpri::DmaDomain>>,
}

impl Device {
    fn new() -> Self {
        let table = Arc::new(DomainTable::new(1));
        let limits = Config {
            spaces_max: 2,
            requests_max: 100,
            ranges_max: 256,
            lease_wait_us: 0,
            generation: 1,
        };
        Self {
            core: FunctionCore::new(Arc::clone(&table), limits),
            table,
            engines: Engines::default(),
            brought: Vec::new(),
        }
    }

    fn tell(&mut self, message: &[u8]) {
        let reply = match Event::decode(message) {
            Ok(event) => self.core.event(&event, &mut self.engines),
            Err(error) => self.core.refuse(error.status()),
        };
        assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }

    fn say(&mut self, event: &Event<'_>) {
        let reply = self.core.event(event, &mut self.engines);
        assert_eq!(reply.status.code, Code::Ok);
    }

    fn fault(&mut self, bytes: &mut Bytes<'_>) {
        let id = self.engines.open.len() as u64;
        let space = DomainId(bytes.small(4).into());
        let page = FilePage(bytes.small(8).into());
        let mut request = PageRequest::demand(
            RequestId(id),
            DeviceId(0),
            QueueId(0),
            space,
            page.single(),
            Access::Write,
        );
        if bytes.small(4) == 0 {
            let slot = bytes.small(4).into();
            request.kind = RequestKind::Overwrite { slot };
        }
        self.engines.open.insert(id, true);
        let sent = self.core.request(SourceNo(0), request, &mut self.engines);
        assert!(sent.is_none() || self.core.phase() == Phase::Ready);
    }

    fn bring(&mut self, bytes: &mut Bytes<'_>) {
        let name = FileKey {
            dev: 0,
            ino: bytes.small(3).into(),
        };
        // The table believes what it is told of the file.
        let opened = self.table.open(name, 8 * PAGE_BYTES);
        self.brought.extend(opened);
        if self.brought.len() > 4 {
            self.brought.remove(0);
        }
    }

    fn check(&self) {
        let open = self.engines.open.values().filter(|open| **open).count();
        assert_eq!(self.core.outstanding(), open);
        for domain in &self.brought {
            let all = FilePage(0).run(8);
            assert!(domain.attributes().bitmap().page_count() >= all.len());
        }
    }
}
