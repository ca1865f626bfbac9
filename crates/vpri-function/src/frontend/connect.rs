// SPDX-License-Identifier: Apache-2.0
//! The messages of vhost-user that set up a connection, until its queues run.

use super::ring::{Notify, RingPlace};
use crate::wire::{CONFIG_BYTES, Code, Config, QUEUE_COUNT, WireError};
use std::{
    io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    sync::mpsc,
    time::Duration,
};
use vhost::{
    VhostBackend, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures,
        message::{VhostUserConfigFlags, VhostUserHeaderFlag},
    },
};

/// The device keeps to virtio 1.
const VERSION_1: u64 = 1 << 32;
/// Notifications by index.
pub const EVENT_INDEX: u64 = 1 << 29;
/// The back end speaks vhost-user's protocol features.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// What a function must have.
const NEEDED: u64 = VERSION_1 | PROTOCOL_FEATURES;
/// Bytes of the configuration space, as in a message.
#[expect(clippy::cast_possible_truncation, reason = "a constant of 64")]
const CONFIG_LEN: u32 = CONFIG_BYTES as u32;
/// Longest wait for DMA that is accepted from a device: section locks are held meanwhile.
pub(crate) const LEASE_WAIT_MAX: Duration = Duration::from_secs(1);
/// How long a device may take to negotiate and start its queues: it may be busy removing a disk.
const AGREE_PATIENCE: Duration = Duration::from_secs(10);
/// Time between two checks whether it is still wanted.
const AGREE_LOOK: Duration = Duration::from_millis(100);
/// Why a connection cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No process listens.
    #[error("no process listens at socket {path}: {source}")]
    Socket {
        /// The socket.
        path: std::path::PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A message failed.
    #[error("it does not accept {message}: {source}")]
    Message {
        /// The message.
        message: &'static str,
        /// The error.
        source: vhost::Error,
    },
    /// It lacks a feature.
    #[error("it is no VPRI function: features {offered:#x} lack {missing:#x}")]
    Features {
        /// The offered features.
        offered: u64,
        /// The missing features.
        missing: u64,
    },
    /// It does not report its configuration.
    #[error("it has no configuration space")]
    NoConfig,
    /// Its configuration is that of something else.
    #[error("its configuration space is not that of a VPRI function of this version: {0}")]
    Config(#[from] WireError),
    /// It may wait longer than a host can.
    #[error("it waits up to {0:?} for DMA; the maximum is {LEASE_WAIT_MAX:?}")]
    LeaseWait(Duration),
    /// No answer in time.
    #[error("it does not answer")]
    Silent,
    /// It disconnected, or misbehaved, before it was set up.
    #[error("it disconnected while it was set up")]
    Lost,
    /// It refuses an event that it must accept.
    #[error("it refuses {event}: {code:?}")]
    Refused {
        /// The event.
        event: &'static str,
        /// The status.
        code: Code,
    },
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] io::Error),
}

pub(crate) fn failed(message: &'static str) -> impl Fn(vhost::Error) -> ConnectError {
    move |source| ConnectError::Message { message, source }
}

/// Runs `work`, which talks to a back end on another copy of `closing`, for at most
/// [`AGREE_PATIENCE`] or until `is_stopped`. vhost's front end waits for answers without limit:
/// closing the socket ends that wait.
pub fn bounded<T: Send>(
    closing: &UnixStream,
    is_stopped: impl Fn() -> bool,
    work: impl FnOnce() -> Result<T, ConnectError> + Send,
) -> Result<T, ConnectError> {
    let (done, is_done) = mpsc::channel();
    std::thread::scope(|scope| {
        let working = scope.spawn(move || {
            let worked = work();
            if done.send(()).is_err() {
                tracing::debug!("a back end that was given up has answered after all");
            }
            worked
        });
        let mut left = AGREE_PATIENCE;
        while is_done.recv_timeout(AGREE_LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
            left = left.saturating_sub(AGREE_LOOK);
            if left.is_zero() || is_stopped() {
                left = Duration::ZERO;
                if let Err(error) = closing.shutdown(std::net::Shutdown::Both) {
                    tracing::debug!(%error, "hanging up on a back end that does not answer");
                }
                break;
            }
        }
        let worked = working.join().map_err(|_| ConnectError::Lost)?;
        if left.is_zero() {
            return Err(ConnectError::Silent);
        }
        worked
    })
}

/// A front end that has negotiated `wanted` with its back end, and the properties of the back end.
pub fn agree(stream: UnixStream, wanted: u64) -> Result<(Frontend, u64, Config), ConnectError> {
    let mut frontend = Frontend::from_stream(stream, u64::from(QUEUE_COUNT));
    frontend.set_owner().map_err(failed("SET_OWNER"))?;
    let offered = frontend.get_features().map_err(failed("GET_FEATURES"))?;
    let missing = NEEDED & !offered;
    if missing != 0 {
        return Err(ConnectError::Features { offered, missing });
    }
    let features = offered & (NEEDED | wanted);
    frontend
        .set_features(features)
        .map_err(failed("SET_FEATURES"))?;
    let protocol = frontend
        .get_protocol_features()
        .map_err(failed("GET_PROTOCOL_FEATURES"))?;
    let use_of = VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK;
    let agreed = protocol & use_of;
    if !agreed.contains(VhostUserProtocolFeatures::CONFIG) {
        return Err(ConnectError::NoConfig);
    }
    frontend
        .set_protocol_features(agreed)
        .map_err(failed("SET_PROTOCOL_FEATURES"))?;
    if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    let flags = VhostUserConfigFlags::empty();
    let (_, bytes) = frontend
        .get_config(0, CONFIG_LEN, flags, &[0; CONFIG_BYTES])
        .map_err(failed("GET_CONFIG"))?;
    let config = Config::decode(&bytes)?;
    Ok((frontend, features, config))
}

/// How notifications work under `features`.
pub const fn notify_of(features: u64) -> Notify {
    if features & EVENT_INDEX == 0 {
        Notify::Flags
    } else {
        Notify::EventIndex
    }
}

/// Hands queue `index`, which lies at `place`, to the device.
pub fn start_queue(
    frontend: &mut Frontend,
    index: u16,
    place: RingPlace,
    [call, errors, kick]: [BorrowedFd<'_>; 3],
) -> Result<(), ConnectError> {
    let queue = usize::from(index);
    let addresses = VringConfigData {
        queue_max_size: place.size,
        queue_size: place.size,
        flags: 0,
        desc_table_addr: super::area::BASE + place.descriptors,
        used_ring_addr: super::area::BASE + place.used,
        avail_ring_addr: super::area::BASE + place.available,
        log_addr: None,
    };
    let event = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(pagetide_sys::event::for_vhost);
    frontend
        .set_vring_num(queue, place.size)
        .map_err(failed("SET_VRING_NUM"))?;
    frontend
        .set_vring_base(queue, 0)
        .map_err(failed("SET_VRING_BASE"))?;
    frontend
        .set_vring_addr(queue, &addresses)
        .map_err(failed("SET_VRING_ADDR"))?;
    frontend
        .set_vring_call(queue, &event(call)?)
        .map_err(failed("SET_VRING_CALL"))?;
    frontend
        .set_vring_err(queue, &event(errors)?)
        .map_err(failed("SET_VRING_ERR"))?;
    frontend
        .set_vring_kick(queue, &event(kick)?)
        .map_err(failed("SET_VRING_KICK"))?;
    frontend
        .set_vring_enable(queue, true)
        .map_err(failed("SET_VRING_ENABLE"))
}
