// SPDX-License-Identifier: Apache-2.0
//! [`Orders`]: how a device's threads are told to end, and to read no messages.

use super::control::Control;
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How long a message that is under way when a device is parked may take. One that stops a ring waits for its I/O.
const MESSAGE_WAIT: Duration = Duration::from_secs(1);

/// How a listener is to end, and whether its connection threads read messages until then.
pub(super) struct Orders {
    /// Readable once it is to end.
    pub end: OwnedFd,
    /// It parks its front end.
    parks: AtomicBool,
    talk: Mutex<Talk>,
    changed: Condvar,
}

/// What a connection thread may do, and does.
#[derive(Default)]
struct Talk {
    rest: Rest,
    message: Message,
    /// Until when a message under way is waited for, once it was asked to rest.
    until: Option<Instant>,
    link: Link,
}

/// Whether its front end may still be listened to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Link {
    #[default]
    Up,
    /// It was hung up on.
    Down,
}

/// Whether it may begin to read a message.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Rest {
    #[default]
    No,
    /// Not now: the process may be replaced. What comes stays in the socket.
    Wanted,
    /// The device ends.
    Over,
}

/// Whether it is in the middle of one.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Message {
    #[default]
    None,
    UnderWay,
}

impl Orders {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            end: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            parks: AtomicBool::new(false),
            talk: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn talk(&self) -> MutexGuard<'_, Talk> {
        self.talk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message is there: waits while none is to be read; false if none is any more.
    pub fn begin_message(&self) -> bool {
        let waits = |talk: &mut Talk| talk.rest == Rest::Wanted && talk.link == Link::Up;
        let talk = self.changed.wait_while(self.talk(), waits);
        let mut talk = talk.unwrap_or_else(PoisonError::into_inner);
        if self.parks() || talk.link == Link::Down {
            return false;
        }
        talk.message = Message::UnderWay;
        true
    }

    pub fn end_message(&self) {
        self.talk().message = Message::None;
        self.changed.notify_all();
    }

    /// A front end has come, and there is no other.
    pub fn connected(&self) {
        self.talk().link = Link::Up;
    }

    /// The front end was hung up on: its thread reads no message any more, and waits for nothing, also while the
    /// device rests.
    pub fn hung_up(&self) {
        self.talk().link = Link::Down;
        self.changed.notify_all();
    }

    /// How long a message that is under way may still take.
    pub fn message_wait(&self) -> Duration {
        let talk = self.talk();
        match (talk.message, talk.until) {
            (Message::UnderWay, Some(until)) => until.saturating_duration_since(Instant::now()),
            _ => MESSAGE_WAIT,
        }
    }

    pub fn end(&self) {
        self.talk().rest = Rest::Over;
        self.changed.notify_all();
        if let Err(error) = rustix::io::write(&self.end, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "a device's listener cannot be stopped");
        }
    }

    pub fn parks(&self) -> bool {
        self.parks.load(Ordering::Acquire)
    }

    /// The device is to end, and to be parked.
    pub fn park(&self) {
        self.parks.store(true, Ordering::Release);
        self.end();
    }

    /// From now on no message is read, until [`Self::speak`].
    pub fn rest(orders: &Arc<Self>, control: &Arc<Control>) -> Resting {
        let until = Instant::now() + MESSAGE_WAIT;
        let mut talk = orders.talk();
        if talk.rest == Rest::No {
            talk.rest = Rest::Wanted;
        }
        talk.until = Some(until);
        drop(talk);
        Resting {
            control: Arc::clone(control),
            orders: Arc::clone(orders),
            until,
        }
    }

    /// Messages are read again.
    pub fn speak(&self) {
        let mut talk = self.talk();
        if talk.rest == Rest::Wanted {
            *talk = Talk {
                message: talk.message,
                link: talk.link,
                ..Talk::default()
            };
        }
        drop(talk);
        self.changed.notify_all();
    }
}

/// A device that reads no further message.
pub(crate) struct Resting {
    control: Arc<Control>,
    orders: Arc<Orders>,
    until: Instant,
}

impl Resting {
    /// Waits until no message is under way, at most for [`MESSAGE_WAIT`] since it was asked to rest.
    pub fn wait(self) {
        let left = self.until.saturating_duration_since(Instant::now());
        let is_under_way = |talk: &mut Talk| talk.message == Message::UnderWay;
        let waited =
            (self.orders.changed).wait_timeout_while(self.orders.talk(), left, is_under_way);
        if waited.is_ok_and(|(_, waited)| waited.timed_out()) {
            let socket = self.control.socket.display();
            tracing::warn!(%socket, "a front end does not come to the end of a message");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn wait_for_the_end_of_a_rest_ends_when_the_front_end_is_hung_up_on() {
        let orders = Arc::new(Orders::new().unwrap());
        orders.talk().rest = Rest::Wanted;
        let begin = || {
            let orders = Arc::clone(&orders);
            thread::spawn(move || orders.begin_message())
        };
        let first = begin();
        orders.hung_up();
        assert!(!first.join().unwrap(), "it reads a message of nobody");
        // The device rests still: the next one waits for its end.
        orders.connected();
        let second = begin();
        orders.speak();
        assert!(second.join().unwrap());
        assert_eq!(orders.talk().message, Message::UnderWay);
    }
}
