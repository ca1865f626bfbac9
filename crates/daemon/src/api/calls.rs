// SPDX-License-Identifier: Apache-2.0
//! [`Calls`]: work for clients that is under way, whether or not they still wait for it.
//!
//! A client that leaves takes its connection along, and the server has nothing to wait for then. But its work, a
//! detach say, goes on, and must not be cut off in the middle by an upgrade.

use std::sync::Arc;
use tokio::{sync::watch, task::JoinError};

/// See the module. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Calls(Arc<watch::Sender<usize>>);

/// One of them; over when it is dropped.
struct Call(Calls);

impl Default for Calls {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

impl Calls {
    /// Does `work` where it may block. It goes on, and counts, if this is dropped.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        self.0.send_modify(|count| *count += 1);
        let call = Call(self.clone());
        let work = move || {
            let done = work();
            drop(call);
            done
        };
        tokio::task::spawn_blocking(work).await
    }

    /// Returns once there are none.
    pub(crate) async fn are_over(&self) {
        let mut count = self.0.subscribe();
        if count.wait_for(|count| *count == 0).await.is_err() {
            unreachable!("its sender is here");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc::channel, time::Duration};
    use tokio::time::timeout;

    #[test]
    fn work_whose_client_has_left_counts_until_it_is_done() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let calls = Calls::default();
            calls.are_over().await;
            let (go_on, told) = channel::<()>();
            let client = calls.run(move || told.recv());
            assert!(
                timeout(Duration::ZERO, client).await.is_err(),
                "it has left"
            );
            assert!(timeout(Duration::ZERO, calls.are_over()).await.is_err());
            go_on.send(()).unwrap();
            calls.are_over().await;
            assert_eq!(calls.run(|| 7).await.unwrap(), 7);
            assert!(calls.run(|| panic!("it ends")).await.is_err());
            calls.are_over().await;
        });
    }
}
