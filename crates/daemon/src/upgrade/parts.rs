// SPDX-License-Identifier: Apache-2.0
//! [`Parts`]: everything that passes from one process to the next, as values and as a message.

use crate::{api::ApiSocket, control::ControlError, state_dir::StateDir};
use pagetide_handover::{
    Descriptors, HandoverError,
    message::{Fd, Go},
};
use std::os::fd::OwnedFd;

/// See the module.
#[derive(Debug)]
pub(crate) struct Parts {
    /// When the daemon began to stop its work.
    pub(crate) stopped_ns: u64,
    /// The lock file of the state directory.
    pub(crate) lock: OwnedFd,
    /// The socket of the API.
    pub(crate) api: OwnedFd,
}

/// Numbers descriptors in the order in which they are put in.
#[derive(Default)]
struct Numbering(Vec<OwnedFd>);

impl Numbering {
    fn put(&mut self, fd: OwnedFd) -> Fd {
        // A message has far fewer: `Channel` refuses more.
        let number = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0.push(fd);
        Fd(number)
    }
}

impl Parts {
    /// Of a daemon that stops its work now.
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
        })
    }

    /// As a message, and the descriptors that it names.
    pub(crate) fn into_message(self) -> (Go, Vec<OwnedFd>) {
        let mut fds = Numbering::default();
        let go = Go {
            stopped_ns: self.stopped_ns,
            lock: fds.put(self.lock),
            api: fds.put(self.api),
            devices: Vec::new(),
        };
        (go, fds.0)
    }

    /// From a message.
    ///
    /// # Errors
    /// It names descriptors that did not come with it, or has what this version cannot take.
    pub(crate) fn from_message(go: &Go, mut fds: Descriptors) -> Result<Self, HandoverError> {
        Ok(Self {
            stopped_ns: go.stopped_ns,
            lock: fds.take(go.lock)?,
            api: fds.take(go.api)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_from_their_message_as_they_were() {
        let file = |name: &str| -> OwnedFd {
            rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap()
        };
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let parts = Parts {
            stopped_ns: 7,
            lock: file("lock"),
            api: file("api"),
        };
        let (lock, api) = (inode(&parts.lock), inode(&parts.api));
        let (go, fds) = parts.into_message();
        let again = Parts::from_message(&go, fds.into_iter().collect()).unwrap();
        assert_eq!((inode(&again.lock), inode(&again.api)), (lock, api));
        assert_eq!(again.stopped_ns, 7);
        let missing = Parts::from_message(&go, [again.lock].into_iter().collect());
        assert!(matches!(
            missing,
            Err(HandoverError::Descriptor { index: 1 })
        ));
    }
}
