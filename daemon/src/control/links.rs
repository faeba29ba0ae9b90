//! The interfaces of the host, as the kernel tells of them.
//!
//! A tap reports its own deletion. The descriptor of a deleted macvtap stays silent, and only a
//! notification (rtnetlink(7)) shows that an interface is back, is down, or has left its bridge.
//! The notifications about all interfaces are kept, because asking the kernel would wait for its
//! lock of the network configuration. Only if notifications were lost, because very many came at
//! once, the kernel is asked for all interfaces.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    socket,
};

use crate::config::UplinkConfig;
use crate::port::build::Addresses;

/// The multicast group of link changes (linux/rtnetlink.h, RTMGRP_LINK).
const LINK_GROUP: u32 = 1;
/// Longer than a notification is.
const MESSAGE_BYTES_MAX: usize = 32 << 10;

/// Bytes of `nlmsghdr`, `ifinfomsg` and `rtattr` (linux/netlink.h, linux/rtnetlink.h).
const MESSAGE_HEADER: usize = 16;
const LINK_HEADER: usize = 16;
const ATTRIBUTE_HEADER: usize = 4;
const NEW_LINK: u16 = 16;
const DELETED_LINK: u16 = 17;
const GET_LINK: u16 = 18;
/// NLM_F_REQUEST | NLM_F_DUMP.
const ALL: u16 = 0x301;
/// IFLA_ADDRESS, IFLA_IFNAME, IFLA_MASTER and IFLA_LINKINFO.
const ADDRESS: u16 = 1;
const NAME: u16 = 3;
const MASTER: u16 = 10;
const INFO: u16 = 18;
/// In it, IFLA_INFO_KIND and IFLA_INFO_DATA; in that, IFLA_TUN_TYPE and IFLA_TUN_VNET_HDR
/// (linux/if_link.h), and the type of a tap (IFF_TAP, linux/if_tun.h).
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const TUN_TYPE: u16 = 3;
const TUN_VNET_HDR: u16 = 5;
const TAP: u8 = 2;
/// IFF_UP and IFF_RUNNING (linux/if.h).
const UP: u32 = 1;
const RUNNING: u32 = 0x40;

/// An interface.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Link {
    pub(super) name: String,
    flags: u32,
    /// The number of the bridge that it is a port of, or 0.
    master: u32,
    pub(super) address: [u8; 6],
    /// `None`: it is no tap. Whether its holder takes virtio-net headers.
    pub(super) tap: Option<bool>,
}

impl Link {
    /// A port of this bridge, or a bridge; `tap` as in the field.
    #[cfg(test)]
    pub(super) fn new(name: &str, master: u32, address: [u8; 6], tap: Option<bool>) -> Self {
        Self { name: name.into(), flags: UP | RUNNING, master, address, tap }
    }

    /// The same with nobody who holds it.
    #[cfg(test)]
    pub(super) fn unheld(self) -> Self {
        Self { flags: UP, ..self }
    }

    /// Somebody holds it, if it is a tap.
    pub(super) const fn is_running(&self) -> bool {
        self.flags & RUNNING != 0
    }
}

/// All interfaces, and a netlink socket that becomes readable when one changes.
#[derive(Debug)]
pub(crate) struct LinkWatch {
    fd: OwnedFd,
    links: BTreeMap<u32, Link>,
    addresses: Addresses,
}

impl LinkWatch {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let protocol = SockProtocol::NetlinkRoute;
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, LINK_GROUP))?;
        let mut watch = Self { fd, links: BTreeMap::new(), addresses: Addresses::default() };
        watch.ask_for_all()?;
        watch.read();
        Ok(watch)
    }

    /// With these interfaces, and no news of others.
    #[cfg(test)]
    pub(super) fn of(links: impl IntoIterator<Item = (u32, Link)>) -> Self {
        let (fd, _) = rustix::pipe::pipe().unwrap();
        Self { fd, links: links.into_iter().collect(), addresses: Addresses::default() }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The addresses of all interfaces, from now on.
    pub(crate) fn addresses(&self) -> Addresses {
        self.addresses.clone()
    }

    /// Forgets everything and asks for all of it.
    fn begin_again(&mut self) {
        self.links.clear();
        self.addresses.clear();
        // Errors: nothing is known until there is news of an interface.
        let _ = self.ask_for_all();
    }

    /// The answer is read as notifications are.
    fn ask_for_all(&self) -> io::Result<()> {
        let mut request = [0; MESSAGE_HEADER + LINK_HEADER];
        request[..4].copy_from_slice(&(MESSAGE_HEADER + LINK_HEADER).to_ne_bytes()[..4]);
        request[4..6].copy_from_slice(&GET_LINK.to_ne_bytes());
        request[6..8].copy_from_slice(&ALL.to_ne_bytes());
        send(self.fd.as_raw_fd(), &request, MsgFlags::empty())?;
        Ok(())
    }

    /// Reads all notifications.
    pub(super) fn read(&mut self) {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        loop {
            match recv(self.fd.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
                Ok(len) => self.note_all(&bytes[..len]),
                Err(Errno::EINTR) => {}
                // Some were lost.
                Err(Errno::ENOBUFS) => self.begin_again(),
                Err(_) => return,
            }
        }
    }

    fn note_all(&mut self, mut messages: &[u8]) {
        while let Some(head) = messages.first_chunk::<MESSAGE_HEADER>() {
            let len = word(head, 0) as usize;
            let Some(message) = messages.get(MESSAGE_HEADER..len) else { return };
            self.note(u16::from_ne_bytes([head[4], head[5]]), message);
            messages = messages.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
    }

    fn note(&mut self, kind: u16, message: &[u8]) {
        let Some(head) = message.first_chunk::<LINK_HEADER>() else { return };
        let (family, index) = (head[0], word(head, 4));
        if family != 0 {
            return; // AF_BRIDGE: what a bridge says of its port
        }
        match kind {
            NEW_LINK => {
                let master = attribute(&message[LINK_HEADER..], MASTER);
                let master = master.and_then(|value| value.first_chunk().copied());
                let master = master.map_or(0, u32::from_ne_bytes);
                let name = attribute(&message[LINK_HEADER..], NAME).unwrap_or_default();
                let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
                let name = String::from_utf8_lossy(name).into_owned();
                let address = attribute(&message[LINK_HEADER..], ADDRESS);
                let address = address.and_then(|value| value.first_chunk().copied());
                if let Some(address) = address {
                    self.addresses.note(index, &name, address);
                }
                let address = address.unwrap_or_default();
                let tap = tap_in(&message[LINK_HEADER..]);
                let link = Link { name, flags: word(head, 8), master, address, tap };
                self.links.insert(index, link);
            }
            DELETED_LINK => {
                self.links.remove(&index);
                self.addresses.forget(index);
            }
            _ => {}
        }
    }

    /// The ports of a bridge, with their numbers. `None`: there is no such bridge.
    pub(super) fn ports_of(&self, bridge: &str) -> Option<impl Iterator<Item = (u32, &Link)>> {
        let bridge =
            self.links.iter().find(|(_, link)| link.name == bridge).map(|(index, _)| *index);
        let ports = |bridge| {
            let links = self.links.iter().map(|(index, link)| (*index, link));
            links.filter(move |(_, link)| link.master == bridge)
        };
        bridge.map(ports)
    }

    /// Whether there is an interface with this number, as far as it was heard.
    pub(super) fn has(&self, index: u32) -> bool {
        self.links.contains_key(&index)
    }

    /// The fault of an uplink, if there is one; and the bridge that it is in.
    pub(super) fn judge(&self, config: &UplinkConfig, index: u32) -> (Option<String>, u32) {
        let Some(link) = self.links.get(&index) else { return (None, 0) };
        let ifname = &config.ifname;
        let wanted = config.bridge.as_deref();
        let bridge = wanted.unwrap_or("its bridge");
        let master = self.links.get(&link.master);
        let is_elsewhere = |name: &str| if_nametoindex(name).unwrap_or(0) != link.master;
        let trouble = match wanted {
            _ if link.flags & UP == 0 => format!("{ifname} is down"),
            _ if link.flags & RUNNING == 0 => format!("{ifname} has no carrier"),
            Some(name) if link.master == 0 => format!("{ifname} is not in {name}"),
            Some(name) if is_elsewhere(name) => {
                let other = master.map_or("another bridge", |master| &master.name);
                format!("{ifname} is in {other}, not in {name}; it is left there")
            }
            _ if master.is_some_and(|master| master.flags & UP == 0) => format!("{bridge} is down"),
            _ => return (None, link.master),
        };
        (Some(trouble), link.master)
    }

    /// Why the tap of a VM has no frames, if it has none.
    pub(super) fn judge_tap(&self, index: u32) -> Option<String> {
        let Link { name, flags, .. } = self.links.get(&index)?;
        match (flags & UP, flags & RUNNING) {
            (0, _) => Some(format!("{name} is down")),
            (_, 0) => Some(format!("nobody holds {name}: the VM does not run")),
            _ => None,
        }
    }

    /// Whether an uplink that should be in a bridge is in none.
    pub(super) fn is_outside(&self, config: &UplinkConfig, index: u32) -> bool {
        let link = self.links.get(&index);
        config.bridge.is_some() && link.is_some_and(|link| link.master == 0)
    }
}

/// Whether an interface with these attributes is a tap, and its holder takes virtio-net headers.
fn tap_in(attributes: &[u8]) -> Option<bool> {
    let info = attribute(attributes, INFO)?;
    let data = attribute(info, INFO_DATA)?;
    let byte = |kind| attribute(data, kind).and_then(|value| value.first().copied());
    let is_tap = attribute(info, INFO_KIND)? == b"tun\0" && byte(TUN_TYPE)? == TAP;
    is_tap.then(|| byte(TUN_VNET_HDR) == Some(1))
}

fn word(bytes: &[u8; 16], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The value of the first attribute of this type.
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let head = bytes.first_chunk::<ATTRIBUTE_HEADER>()?;
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let value = bytes.get(ATTRIBUTE_HEADER..len)?;
        if u16::from_ne_bytes([head[2], head[3]]) == wanted {
            return Some(value);
        }
        bytes = bytes.get(len.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::UplinkKind;

    /// A notification, as the kernel (6.1) writes them.
    fn message(kind: u16, family: u8, index: u32, flags: u32, master: Option<u32>) -> Vec<u8> {
        let mut body =
            [&[family, 0, 0, 0][..], &index.to_ne_bytes(), &flags.to_ne_bytes()].concat();
        body.extend([0xff; 4]);
        let name = if index == 9 { *b"br0\0" } else { *b"np0\0" };
        body.extend([[8, 0, 3, 0], name].concat()); // IFLA_IFNAME
        body.extend([5, 0, 16, 0, 6, 0, 0, 0]); // IFLA_OPERSTATE, and padding
        if let Some(master) = master {
            body.extend([8, 0, 10, 0]);
            body.extend(master.to_ne_bytes());
        }
        let len = u32::try_from(MESSAGE_HEADER + body.len()).unwrap();
        let head = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10]].concat();
        [head, body].concat()
    }

    fn watch() -> LinkWatch {
        LinkWatch::of([])
    }

    fn config(bridge: Option<&str>) -> UplinkConfig {
        UplinkConfig {
            name: "lan".into(),
            network: None,
            kind: UplinkKind::Tap,
            ifname: "np0".into(),
            create: true,
            bridge: bridge.map(Into::into),
        }
    }

    #[test]
    fn what_is_wrong_is_said_and_nothing_else() {
        let mut watch = watch();
        let mut judge = |messages: &[Vec<u8>], bridge| {
            watch.note_all(&messages.concat());
            watch.judge(&config(bridge), 7)
        };
        let said = |text: &str, bridge| (Some(text.to_owned()), bridge);
        let (both, master) = (UP | RUNNING, Some(9));
        let br0 = message(NEW_LINK, 0, 9, UP, None);
        assert_eq!(judge(&[], None), (None, 0), "nothing is known of it");
        assert_eq!(judge(&[message(NEW_LINK, 0, 7, 0, None)], None), said("np0 is down", 0));
        assert_eq!(
            judge(&[message(NEW_LINK, 0, 7, UP, None)], None),
            said("np0 has no carrier", 0)
        );
        assert_eq!(judge(&[message(NEW_LINK, 0, 7, both, None)], None), (None, 0));
        assert_eq!(judge(&[], Some("no such br")), said("np0 is not in no such br", 0));
        let joins = [br0, message(NEW_LINK, 0, 7, both, master)];
        assert_eq!(judge(&joins, None), (None, 9));
        let other = judge(&[], Some("no such br"));
        assert_eq!(other, said("np0 is in br0, not in no such br; it is left there", 9));
        let down = message(NEW_LINK, 0, 9, 0, None);
        assert_eq!(judge(&[down], None), said("its bridge is down", 9));
        assert_eq!(watch.judge_tap(7), None);
        watch.note_all(&message(NEW_LINK, 0, 7, UP, None));
        let nobody = "nobody holds np0: the VM does not run";
        assert_eq!(watch.judge_tap(7).as_deref(), Some(nobody));
        watch.note_all(&message(NEW_LINK, 0, 7, both, master));
        let mut judge = |messages: &[Vec<u8>], bridge| {
            watch.note_all(&messages.concat());
            watch.judge(&config(bridge), 7)
        };
        // A bridge's message about its port is not about the interface.
        assert_eq!(judge(&[message(DELETED_LINK, 7, 7, both, master)], None).1, 9);
        assert_eq!(judge(&[message(DELETED_LINK, 0, 7, both, None)], None), (None, 0));
    }

    #[test]
    fn an_interface_whose_end_was_not_heard_is_forgotten_when_all_are_asked_for() {
        let mut watch = LinkWatch::new().unwrap();
        watch.note_all(&message(NEW_LINK, 0, u32::MAX, UP, None));
        watch.read();
        let known = |watch: &LinkWatch, index| watch.links.contains_key(&index);
        let loopback = if_nametoindex("lo").unwrap();
        assert!(known(&watch, loopback) && known(&watch, u32::MAX));
        watch.begin_again();
        watch.read();
        assert!(known(&watch, loopback) && !known(&watch, u32::MAX));
    }

    #[test]
    fn whatever_bytes_come_they_end() {
        let whole = message(NEW_LINK, 0, 7, UP, Some(9));
        for cut in 0..whole.len() {
            watch().note_all(&whole[..cut]);
            let mut broken = whole.clone();
            broken[cut] = 0;
            watch().note_all(&broken);
        }
    }
}
