// SPDX-License-Identifier: Apache-2.0
//! [`Parts`]: everything that passes from one process to the next, as values and as a message.

use crate::{api::ApiSocket, control::ControlError, host::HandedOver, state_dir::StateDir};
use pagetide_addr::{FrontendVa, Gpa};
use pagetide_dpu::{
    Enabled, InflightRecord, ParkedDevice, ParkedFrontEnd, ParkedNic, Record, RegionShape,
    RingAddresses, RingSettings, Runs,
};
use pagetide_handover::{
    Descriptors, HandoverError,
    message::{Addresses, Device, Fd, FrontEnd, Go, Inflight, Nic, Region, Ring},
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Seek},
    os::fd::OwnedFd,
    sync::Arc,
};

/// See the module.
pub(crate) struct Parts {
    /// When the daemon began to stop its work.
    pub(crate) stopped_ns: u64,
    /// The lock file of the state directory.
    pub(crate) lock: OwnedFd,
    /// The socket of the API.
    pub(crate) api: OwnedFd,
    /// VMs and devices.
    pub(crate) handed: HandedOver,
}

/// Numbers descriptors in the order in which they are put in.
#[derive(Default)]
struct Numbering(Vec<OwnedFd>);

impl Numbering {
    fn put(&mut self, fd: impl Into<OwnedFd>) -> Fd {
        // A message has far fewer: `Channel` refuses more.
        let number = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0.push(fd.into());
        Fd(number)
    }

    fn device(&mut self, device: ParkedDevice) -> Device {
        Device {
            socket: device.socket,
            listener: self.put(device.listener),
            front_end: device.front_end.map(|front_end| self.front_end(front_end)),
            nic: device.nic.map(|nic| self.nic(nic)),
        }
    }

    fn nic(&mut self, nic: ParkedNic) -> Nic {
        let packets = packets_in_a_file(&nic).unwrap_or_else(|error| {
            // There is no way back, and the others go on.
            tracing::error!(%error, packets = nic.packets.len(), "packets for a guest are lost");
            None
        });
        Nic {
            interface: nic.interface,
            links: nic.descriptors.into_iter().map(|fd| self.put(fd)).collect(),
            packets: packets.map(|file| self.put(file)),
        }
    }

    fn front_end(&mut self, parked: ParkedFrontEnd) -> FrontEnd {
        let ParkedFrontEnd { connection, record } = parked;
        let regions = record.memory.into_iter().map(|(shape, file)| Region {
            gpa: shape.gpa.0,
            bytes: shape.bytes,
            frontend: shape.frontend.0,
            file_offset: shape.file_offset,
            file: self.put(file),
        });
        FrontEnd {
            memory: regions.collect(),
            connection: self.put(connection),
            features: record.features,
            protocol_features: record.protocol_features,
            inflight: record.inflight.map(|inflight| Inflight {
                bytes: inflight.bytes,
                file_offset: inflight.file_offset,
                queues: inflight.queues,
                queue_size: inflight.queue_size,
                file: self.put(inflight.file),
            }),
            rings: record
                .rings
                .into_iter()
                .map(|ring| self.ring(ring))
                .collect(),
        }
    }

    fn ring(&mut self, ring: RingSettings) -> Ring {
        Ring {
            size: ring.size,
            base: ring.base,
            addresses: ring.addresses.map(|at| Addresses {
                descriptors: at.descriptors.0,
                avail: at.avail.0,
                used: at.used.0,
            }),
            // Nobody else has it: the ring does not run any more.
            kick: ring
                .kick
                .and_then(Arc::into_inner)
                .map(|kick| self.put(kick)),
            call: ring.call.map(|call| self.put(call)),
            error: ring.error.map(|error| self.put(error)),
            enabled: ring.enabled == Enabled::Yes,
        }
    }
}

impl Parts {
    /// Of a daemon that stops its work now, but for VMs and devices.
    pub(crate) fn of(
        state_dir: &StateDir,
        socket: &ApiSocket,
        stopped_ns: u64,
    ) -> Result<Self, ControlError> {
        let failed = |error: std::io::Error| ControlError::failed(error.to_string());
        Ok(Self {
            stopped_ns,
            lock: state_dir.lock().map_err(failed)?,
            api: socket.share().map_err(failed)?,
            handed: HandedOver::default(),
        })
    }

    /// As a message, and the descriptors that it names.
    pub(crate) fn into_message(self) -> (Go, Vec<OwnedFd>) {
        let mut fds = Numbering::default();
        let HandedOver { vms, devices } = self.handed;
        let go = Go {
            stopped_ns: self.stopped_ns,
            lock: fds.put(self.lock),
            api: fds.put(self.api),
            vms,
            devices: devices
                .into_iter()
                .map(|device| fds.device(device))
                .collect(),
        };
        (go, fds.0)
    }

    /// From a message.
    ///
    /// # Errors
    /// It names descriptors that did not come with it.
    pub(crate) fn from_message(go: &Go, mut fds: Descriptors) -> Result<Self, HandoverError> {
        let devices = go.devices.iter().map(|device| device_of(device, &mut fds));
        let devices = devices.collect::<Result<_, _>>()?;
        Ok(Self {
            stopped_ns: go.stopped_ns,
            lock: fds.take(go.lock)?,
            api: fds.take(go.api)?,
            handed: HandedOver {
                vms: go.vms.clone(),
                devices,
            },
        })
    }
}

fn device_of(device: &Device, fds: &mut Descriptors) -> Result<ParkedDevice, HandoverError> {
    let front_end = device.front_end.as_ref();
    let front_end = front_end.map(|front_end| front_end_of(front_end, fds));
    Ok(ParkedDevice {
        socket: device.socket.clone(),
        front_end: front_end.transpose()?,
        listener: fds.take(device.listener)?.into(),
        nic: device
            .nic
            .as_ref()
            .map(|nic| nic_of(nic, fds))
            .transpose()?,
    })
}

fn nic_of(nic: &Nic, fds: &mut Descriptors) -> Result<ParkedNic, HandoverError> {
    let descriptors = nic.links.iter().map(|fd| fds.take(*fd));
    let descriptors = descriptors.collect::<Result<_, _>>()?;
    let file = nic.packets.map(|fd| fds.take(fd)).transpose()?;
    let packets = file.map(|file| {
        let mut file = File::from(file);
        file.rewind()?;
        ParkedNic::read_packets(&mut BufReader::new(file))
    });
    let packets = packets.transpose().unwrap_or_else(|error| {
        tracing::error!(%error, "packets for a guest are lost");
        None
    });
    Ok(ParkedNic {
        descriptors,
        interface: nic.interface,
        packets: packets.unwrap_or_default(),
    })
}

/// The packets of a device in a file that has no name, if there are any.
fn packets_in_a_file(nic: &ParkedNic) -> io::Result<Option<File>> {
    if nic.packets.is_empty() {
        return Ok(None);
    }
    let file = File::from(memfd_create("pagetide-packets", MemfdFlags::CLOEXEC)?);
    let mut writer = BufWriter::new(file);
    nic.write_packets(&mut writer)?;
    let file = writer
        .into_inner()
        .map_err(io::IntoInnerError::into_error)?;
    Ok(Some(file))
}

fn front_end_of(
    front_end: &FrontEnd,
    fds: &mut Descriptors,
) -> Result<ParkedFrontEnd, HandoverError> {
    let mut memory = Vec::new();
    for region in &front_end.memory {
        let shape = RegionShape {
            gpa: Gpa(region.gpa),
            bytes: region.bytes,
            frontend: FrontendVa(region.frontend),
            file_offset: region.file_offset,
        };
        memory.push((shape, fds.take(region.file)?));
    }
    let inflight = front_end.inflight.as_ref().map(|inflight| {
        Ok::<_, HandoverError>(InflightRecord {
            bytes: inflight.bytes,
            file_offset: inflight.file_offset,
            queues: inflight.queues,
            queue_size: inflight.queue_size,
            file: fds.take(inflight.file)?,
        })
    });
    let inflight = inflight.transpose()?;
    let rings = front_end.rings.iter().map(|ring| ring_of(ring, fds));
    let rings = rings.collect::<Result<_, _>>()?;
    Ok(ParkedFrontEnd {
        connection: fds.take(front_end.connection)?.into(),
        record: Record {
            features: front_end.features,
            protocol_features: front_end.protocol_features,
            memory,
            inflight,
            rings,
        },
    })
}

fn ring_of(ring: &Ring, fds: &mut Descriptors) -> Result<RingSettings, HandoverError> {
    let mut taken = |fd: Option<Fd>| fd.map(|fd| fds.take(fd)).transpose();
    Ok(RingSettings {
        size: ring.size,
        addresses: ring.addresses.map(|at| RingAddresses {
            descriptors: FrontendVa(at.descriptors),
            avail: FrontendVa(at.avail),
            used: FrontendVa(at.used),
        }),
        base: ring.base,
        kick: taken(ring.kick)?.map(Arc::new),
        call: taken(ring.call)?,
        error: taken(ring.error)?,
        enabled: match ring.enabled {
            true => Enabled::Yes,
            false => Enabled::No,
        },
        runs: Runs::No,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        os::unix::net::{UnixListener, UnixStream},
        path::Path,
    };

    fn file() -> OwnedFd {
        rustix::fs::memfd_create("part", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    fn inode(fd: &impl std::os::fd::AsFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_ino
    }

    fn record() -> Record {
        let shape = RegionShape {
            gpa: Gpa(1),
            bytes: 2,
            frontend: FrontendVa(3),
            file_offset: 4,
        };
        let ring = RingSettings {
            size: 256,
            addresses: Some(RingAddresses {
                descriptors: FrontendVa(5),
                avail: FrontendVa(6),
                used: FrontendVa(7),
            }),
            base: 8,
            kick: Some(Arc::new(file())),
            call: Some(file()),
            error: Some(file()),
            enabled: Enabled::Yes,
            runs: Runs::No,
        };
        Record {
            features: 9,
            protocol_features: Some(10),
            memory: vec![(shape, file()), (shape, file())],
            inflight: Some(InflightRecord {
                bytes: 11,
                file_offset: 12,
                queues: 13,
                queue_size: 14,
                file: file(),
            }),
            rings: vec![ring, RingSettings::default()],
        }
    }

    fn parts(dir: &Path) -> Parts {
        let device = |name: &str, front_end| ParkedDevice {
            socket: dir.join(name),
            listener: UnixListener::bind(dir.join(name)).unwrap(),
            front_end,
            nic: None,
        };
        let nic = ParkedNic {
            descriptors: vec![file(), file()],
            interface: 15,
            packets: vec![(1, vec![16; 100].into()), (0, vec![17; 12].into())],
        };
        let front_end = ParkedFrontEnd {
            connection: UnixStream::pair().unwrap().0,
            record: record(),
        };
        Parts {
            stopped_ns: 7,
            lock: file(),
            api: file(),
            handed: HandedOver {
                vms: vec!["a".into()],
                devices: vec![
                    device("x", Some(front_end)),
                    device("y", None),
                    ParkedDevice {
                        nic: Some(nic),
                        ..device("z", None)
                    },
                ],
            },
        }
    }

    /// Everything in it that can be compared: its message, and the files in the order in which it names them.
    fn facts(parts: Parts) -> (Go, Vec<u64>) {
        let (go, fds) = parts.into_message();
        (go, fds.iter().map(inode).collect())
    }

    #[test]
    fn parts_come_back_from_their_message_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let (go, fds) = parts(dir.path()).into_message();
        let inodes: Vec<u64> = fds.iter().map(inode).collect();
        assert_eq!(inodes.len(), 15);
        let again = Parts::from_message(&go, fds.into_iter().collect()).unwrap();
        let packets = |parts: &Parts| {
            parts.handed.devices[2]
                .nic
                .as_ref()
                .unwrap()
                .packets
                .clone()
        };
        let other_dir = tempfile::tempdir().unwrap();
        assert_eq!(packets(&again), packets(&parts(other_dir.path())));
        // The packets are in a file that was made anew; all others are the same.
        let (go_again, inodes_again) = facts(again);
        assert_eq!(go_again, go);
        assert_eq!(inodes_again[..14], inodes[..14]);
    }

    #[test]
    fn message_whose_descriptors_did_not_all_come_or_are_named_twice_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (go, mut fds) = parts(dir.path()).into_message();
        let mut twice = go.clone();
        twice.api = twice.lock;
        fds.pop();
        let lost = Parts::from_message(&go, fds.into_iter().collect());
        assert!(matches!(lost, Err(HandoverError::Descriptor { index: 14 })));
        let fds = (0..15).map(|_| file());
        let error = Parts::from_message(&twice, fds.collect()).err();
        assert!(matches!(
            error,
            Some(HandoverError::Descriptor { index: 0 })
        ));
    }
}
