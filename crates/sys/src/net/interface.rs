// SPDX-License-Identifier: Apache-2.0
//! Looking an interface up by name, by rtnetlink (rtnetlink(7)).
//!
//! `/sys/class/net` would be simpler, but shows the network namespace of whoever has mounted it; the
//! socket is in ours.

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};
use std::io;

/// Longest name of an interface (`IFNAMSIZ`, less the NUL).
pub const NAME_BYTES_MAX: usize = 15;

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Interface {
    /// Its number. Another interface of the same name has another one.
    pub index: u32,
    /// Longest packet that it takes, without the Ethernet header.
    pub mtu: u32,
    /// Its driver's name for its kind, such as `tun` or `veth`; `None` for most hardware.
    pub kind: Option<String>,
    /// If it is a TUN or a TAP.
    pub tun: Option<Tun>,
}

/// What is special to a TUN or a TAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tun {
    /// Whether it takes Ethernet packets: a TAP.
    pub is_tap: bool,
    /// Whether it was made for several queues.
    pub is_multi_queue: bool,
    /// Queues that some process has now, as far as it was made for several.
    pub queues: u32,
}

const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const NLM_F_REQUEST: u16 = 1;
const MESSAGE_HEADER: usize = 16;
const LINK_HEADER: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const TUN_TYPE: u16 = 3;
const TUN_MULTI_QUEUE: u16 = 7;
const TUN_NUM_QUEUES: u16 = 8;
const TUN_NUM_DISABLED_QUEUES: u16 = 9;
/// `IFF_TAP`
const TYPE_TAP: u8 = 2;
/// Bits of a type that say how its value is encoded.
const TYPE_MASK: u16 = 0x3fff;

/// True if an interface can have this name.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte > b' ' && byte != b'/' && byte != b':' && byte != 0x7f;
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(is_allowed)
        && !matches!(name, "." | "..")
}

/// The interface of that name in our network namespace; `None` if there is none.
///
/// # Errors
/// The kernel's, or `InvalidData` for an answer that makes no sense.
pub fn look_up(name: &str) -> io::Result<Option<Interface>> {
    if !is_name(name) {
        return Ok(None);
    }
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        // Protocol 0 is `NETLINK_ROUTE`.
        None,
    )?;
    send(&socket, &request(name), SendFlags::empty())?;
    let mut answer = vec![0; 32 << 10];
    let (_, bytes) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
    parse(&answer[..bytes.min(answer.len())])
}

fn request(name: &str) -> Vec<u8> {
    let mut message = vec![0; MESSAGE_HEADER + LINK_HEADER];
    let value = [name.as_bytes(), &[0]].concat();
    let len = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    message.extend(len.to_ne_bytes());
    message.extend(IFLA_IFNAME.to_ne_bytes());
    message.extend(value);
    message.resize(message.len().next_multiple_of(4), 0);
    let bytes = u32::try_from(message.len()).unwrap_or(u32::MAX);
    message[..4].copy_from_slice(&bytes.to_ne_bytes());
    message[4..6].copy_from_slice(&RTM_GETLINK.to_ne_bytes());
    message[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    message
}

fn parse(answer: &[u8]) -> io::Result<Option<Interface>> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "rtnetlink answered nonsense");
    match number_u16(answer, 4).ok_or_else(wrong)? {
        NLMSG_ERROR => {
            let code = number_u32(answer, MESSAGE_HEADER).ok_or_else(wrong)?;
            match i32::from_ne_bytes(code.to_ne_bytes()).checked_neg() {
                Some(libc::ENODEV) => Ok(None),
                Some(code) if code > 0 => Err(io::Error::from_raw_os_error(code)),
                _ => Err(wrong()),
            }
        }
        RTM_NEWLINK => {
            let index = number_u32(answer, MESSAGE_HEADER + 4).ok_or_else(wrong)?;
            let attributes = answer.get(MESSAGE_HEADER + LINK_HEADER..).unwrap_or(&[]);
            Ok(Some(interface_of(index, attributes)))
        }
        _ => Err(wrong()),
    }
}

fn interface_of(index: u32, attributes: &[u8]) -> Interface {
    let info = attribute(attributes, IFLA_LINKINFO).unwrap_or(&[]);
    let kind = attribute(info, INFO_KIND).map(|kind| {
        let kind = kind.split(|byte| *byte == 0).next().unwrap_or(kind);
        String::from_utf8_lossy(kind).into_owned()
    });
    let is_tun = kind.as_deref() == Some("tun");
    let tun = attribute(info, INFO_DATA).filter(|_| is_tun).map(|tun| {
        let number = |kind| attribute(tun, kind).and_then(|value| number_u32(value, 0));
        let byte = |kind| attribute(tun, kind).and_then(|value| value.first().copied());
        let queues = number(TUN_NUM_QUEUES).unwrap_or(0);
        Tun {
            is_tap: byte(TUN_TYPE) == Some(TYPE_TAP),
            is_multi_queue: byte(TUN_MULTI_QUEUE).is_some_and(|byte| byte != 0),
            queues: queues.saturating_add(number(TUN_NUM_DISABLED_QUEUES).unwrap_or(0)),
        }
    });
    let mtu = attribute(attributes, IFLA_MTU).and_then(|value| number_u32(value, 0));
    Interface {
        index,
        mtu: mtu.unwrap_or(0),
        kind,
        tun,
    }
}

/// The value of the first attribute of that type.
fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(number_u16(attributes, 0)?);
        let value = attributes.get(4..len)?;
        if number_u16(attributes, 2)? & TYPE_MASK == kind {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

fn number_u16(bytes: &[u8], at: usize) -> Option<u16> {
    let (bytes, _) = bytes.get(at..)?.split_first_chunk()?;
    Some(u16::from_ne_bytes(*bytes))
}

fn number_u32(bytes: &[u8], at: usize) -> Option<u32> {
    let (bytes, _) = bytes.get(at..)?.split_first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute_of(kind: u16, value: &[u8]) -> Vec<u8> {
        let len = u16::try_from(4 + value.len()).unwrap();
        let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn answer(kind: u16, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; MESSAGE_HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes.extend(rest);
        bytes
    }

    #[test]
    fn loopback_is_found_and_what_is_not_there_is_none() {
        if crate::emulated::skip() {
            return;
        }
        let found = look_up("lo").unwrap().unwrap();
        assert!(found.index > 0 && found.mtu > 0, "{found:?}");
        assert_eq!(found.tun, None);
        for name in ["no-such-if-0", "", "a b", "..", "name-of-17-bytes-", "a/b"] {
            assert_eq!(look_up(name).unwrap(), None, "{name:?}");
        }
    }

    #[test]
    fn what_the_kernel_says_of_a_tap_is_read() {
        let tun = [
            attribute_of(TUN_TYPE, &[TYPE_TAP]),
            attribute_of(TUN_MULTI_QUEUE, &[1]),
            attribute_of(TUN_NUM_QUEUES, &3_u32.to_ne_bytes()),
            attribute_of(TUN_NUM_DISABLED_QUEUES, &1_u32.to_ne_bytes()),
        ];
        let info = [
            attribute_of(INFO_KIND, b"tun\0"),
            attribute_of(INFO_DATA | 0x8000, &tun.concat()),
        ];
        let mut link = vec![0; LINK_HEADER];
        link[4..8].copy_from_slice(&7_u32.to_ne_bytes());
        link.extend(attribute_of(IFLA_IFNAME, b"tap0\0"));
        link.extend(attribute_of(IFLA_MTU, &9000_u32.to_ne_bytes()));
        link.extend(attribute_of(IFLA_LINKINFO, &info.concat()));
        let whole = answer(RTM_NEWLINK, &link);
        let tap = Tun {
            is_tap: true,
            is_multi_queue: true,
            queues: 4,
        };
        let expected = Interface {
            index: 7,
            mtu: 9000,
            kind: Some("tun".into()),
            tun: Some(tap),
        };
        assert_eq!(parse(&whole).unwrap(), Some(expected));
        // However it is cut, it is read or refused, and nothing is read beyond it.
        for len in 0..whole.len() {
            drop(parse(&whole[..len]));
        }
    }

    #[test]
    fn errors_are_told_from_absence() {
        let error = |code: i32| parse(&answer(NLMSG_ERROR, &(-code).to_ne_bytes()));
        assert_eq!(error(libc::ENODEV).unwrap(), None);
        let refused = error(libc::EPERM).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        for nonsense in [answer(NLMSG_ERROR, &[]), answer(99, &[0; 64]), vec![]] {
            assert!(parse(&nonsense).is_err());
        }
        let zero = answer(NLMSG_ERROR, &[0; 4]);
        assert!(parse(&zero).is_err());
    }
}
