// SPDX-License-Identifier: Apache-2.0
//! A TCP stack in user space (smoltcp) over an interface of the bench: one host with one connection.

use crate::net_rig::{Cold, Interface};
use pagetide_frontend::nic::{NET_HEADER_BYTES, Way};
use smoltcp::{
    iface::{Config, Interface as IpInterface, SocketHandle, SocketSet},
    phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken},
    socket::tcp::{Socket, SocketBuffer},
    time::Instant,
    wire::{EthernetAddress, IpAddress, IpCidr},
};

/// Longest packet, with its Ethernet header.
const PACKET_BYTES_MAX: usize = 1514;
/// Packets under way to the device.
const SENDING: u64 = 256;
/// Bytes that a connection buffers each way.
const BUFFER_BYTES: usize = 256 << 10;
const PORT: u16 = 11_211;

/// Which of the two hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Client,
    Server,
}

impl Role {
    fn number(self) -> u8 {
        match self {
            Self::Client => 1,
            Self::Server => 2,
        }
    }

    fn address(self) -> IpAddress {
        IpAddress::v4(10, 0, 0, self.number())
    }
}

/// See the module documentation.
pub(super) struct Stack {
    device: NicDevice,
    ip: IpInterface,
    sockets: SocketSet<'static>,
    connection: SocketHandle,
}

impl Stack {
    /// A host that listens, or connects, at `now_us`.
    ///
    /// # Errors
    /// A message.
    pub fn new(interface: Interface, role: Role, now_us: i64) -> Result<Self, String> {
        let mut device = NicDevice::new(interface);
        let mac = EthernetAddress([2, 0, 0, 0, 0, role.number()]);
        let mut config = Config::new(mac.into());
        config.random_seed = u64::from(role.number());
        let now = Instant::from_micros(now_us);
        let mut ip = IpInterface::new(config, &mut device, now);
        let mut pushed = Ok(());
        ip.update_ip_addrs(|addresses| {
            pushed = addresses.push(IpCidr::new(role.address(), 24));
        });
        pushed.map_err(|_| "the stack has no room for an address")?;
        let buffer = || SocketBuffer::new(vec![0; BUFFER_BYTES]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        let mut sockets = SocketSet::new(Vec::new());
        match role {
            Role::Server => socket.listen(PORT).map_err(|e| e.to_string())?,
            Role::Client => {
                let to = (Role::Server.address(), PORT);
                let connected = socket.connect(ip.context(), to, 40_000);
                connected.map_err(|e| e.to_string())?;
            }
        }
        let connection = sockets.add(socket);
        Ok(Self {
            device,
            ip,
            sockets,
            connection,
        })
    }

    /// Receives what came and sends what is due.
    ///
    /// # Errors
    /// A message of the interface.
    pub fn poll(&mut self, now_us: i64) -> Result<(), String> {
        let now = Instant::from_micros(now_us);
        self.ip.poll(now, &mut self.device, &mut self.sockets);
        self.device.flush()
    }

    /// Sends as many of the bytes as there is room for; how many.
    pub fn send(&mut self, bytes: &[u8]) -> usize {
        let socket = self.sockets.get_mut::<Socket<'_>>(self.connection);
        match socket.can_send() {
            true => socket.send_slice(bytes).unwrap_or(0),
            false => 0,
        }
    }

    /// Takes received bytes; how many.
    pub fn take(&mut self, into: &mut [u8]) -> usize {
        let socket = self.sockets.get_mut::<Socket<'_>>(self.connection);
        match socket.can_recv() {
            true => socket.recv_slice(into).unwrap_or(0),
            false => 0,
        }
    }

    /// The interface below.
    pub fn interface(&self) -> &Interface {
        &self.device.interface
    }
}

/// An interface as smoltcp drives it.
struct NicDevice {
    interface: Interface,
    /// Places for packets to be sent that are free.
    free: Vec<u64>,
    given: bool,
    error: Option<String>,
}

impl NicDevice {
    fn new(interface: Interface) -> Self {
        Self {
            interface,
            free: (0..SENDING).collect(),
            given: false,
            error: None,
        }
    }

    fn next_packet(&mut self) -> Result<Option<Vec<u8>>, String> {
        // Empty buffers may come back between packets.
        while let Some(back) = self.interface.receive(Cold::No)? {
            let Some(bytes) = back.written.checked_sub(NET_HEADER_BYTES) else {
                continue;
            };
            let mut packet = vec![0; bytes as usize];
            let at = back.at + u64::from(NET_HEADER_BYTES);
            let read = self.interface.ram().copy_from(at, &mut packet);
            read.map_err(|e| e.to_string())?;
            return Ok(Some(packet));
        }
        Ok(None)
    }

    /// True if there is a place for a packet.
    fn has_place(&mut self) -> bool {
        loop {
            match self.interface.nic().take(Way::Send) {
                Ok(Some(sent)) => self.free.push(self.interface.sending_number(sent.at)),
                Ok(None) => return !self.free.is_empty(),
                Err(error) => {
                    self.error.get_or_insert(error.to_string());
                    return false;
                }
            }
        }
    }

    fn send(&mut self, packet: &[u8]) -> Result<(), String> {
        let number = self.free.pop().ok_or("no place for a packet")?;
        let at = self.interface.sending_place(number);
        let header = [0; NET_HEADER_BYTES as usize];
        let ram = self.interface.ram();
        ram.copy_to(at, &header).map_err(|e| e.to_string())?;
        let data = at + u64::from(NET_HEADER_BYTES);
        ram.copy_to(data, packet).map_err(|e| e.to_string())?;
        let bytes = NET_HEADER_BYTES + u32::try_from(packet.len()).unwrap_or(0);
        let given = self.interface.nic().give(Way::Send, at, bytes);
        self.given = true;
        match given.map_err(|e| e.to_string())? {
            true => Ok(()),
            false => Err("the ring for packets to be sent is full".into()),
        }
    }

    fn flush(&mut self) -> Result<(), String> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        if std::mem::take(&mut self.given) {
            let kicked = self.interface.nic().kick(Way::Send);
            kicked.map_err(|e| e.to_string())?;
        }
        Ok(())
    }
}

impl Device for NicDevice {
    type RxToken<'a> = Came;
    type TxToken<'a> = Goes<'a>;

    fn receive(&mut self, _now: Instant) -> Option<(Came, Goes<'_>)> {
        if !self.has_place() {
            return None;
        }
        match self.next_packet() {
            Ok(packet) => packet.map(|packet| (Came(packet), Goes(self))),
            Err(error) => {
                self.error.get_or_insert(error);
                None
            }
        }
    }

    fn transmit(&mut self, _now: Instant) -> Option<Goes<'_>> {
        self.has_place().then_some(Goes(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = PACKET_BYTES_MAX;
        capabilities
    }
}

/// A packet that came.
struct Came(Vec<u8>);

impl RxToken for Came {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

/// Leave to send one.
struct Goes<'a>(&'a mut NicDevice);

impl TxToken for Goes<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        if let Err(error) = self.0.send(&packet) {
            self.0.error.get_or_insert(error);
        }
        result
    }
}
