//! The protocol between the daemon and its broker: a request of fixed size, then an answer that is
//! a text or a descriptor. If an answer does not come in time, the channel ends, because the late
//! answer would be taken for that to the next request.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nightporter_attach::area::SLOTS;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
    recvmsg, sendmsg, shutdown, socketpair,
};

use crate::config::{UplinkConfig, UplinkKind, is_ifname};
use crate::errors::StartError;

/// Bytes for a name and the zeros behind it (IFNAMSIZ).
const NAME: usize = 16;
/// Bytes of a request: the operation, the kind, whether to make it; interface and bridge.
pub(super) const REQUEST: usize = 3 + 2 * NAME;
/// Bytes of the longest answer. A longer one is cut.
const ANSWER: usize = 2048;
/// Descriptors of a message, at most: the sockets of an overlay.
const FDS_MAX: usize = 17;

/// The operation.
pub(super) const OPEN: u8 = 1;
pub(super) const JOIN: u8 = 2;
const ENLARGE: u8 = 3;
const ATTACH: u8 = 4;
const DETACH: u8 = 5;

/// The first byte of an answer. A request that is not done may be possible later, or never while
/// the daemon runs.
const DONE: u8 = 0;
const REFUSED: u8 = 1;
const BUSY: u8 = 2;
const FINAL: u8 = 4;

/// Done, with the descriptor if one was asked for; or refused.
pub(super) type Answer = Result<Option<Given>, Refusal>;

/// The descriptor that was asked for.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) fd: OwnedFd,
    /// The others of an attached tap ([`to_attach`]).
    pub(super) more: Vec<OwnedFd>,
    /// The number of the interface that it is; 0: it is a socket.
    pub(super) index: u32,
}

/// Why something is not done.
#[derive(Debug, Default, Eq, PartialEq)]
pub(super) struct Refusal {
    pub(super) what: String,
    pub(super) fix: String,
    /// Another process has it.
    pub(super) is_busy: bool,
    /// Only a restart helps.
    pub(super) is_final: bool,
}

impl From<StartError> for Refusal {
    fn from(e: StartError) -> Self {
        let text = e.to_string();
        let (what, fix) = text.split_once("\n    fix: ").unwrap_or((&text, "report this"));
        Self { what: what.into(), fix: fix.into(), is_busy: false, is_final: true }
    }
}

/// To enlarge the buffers of the sockets that come with it: the first's to receive, the others' to
/// send.
pub(super) const TO_ENLARGE: [u8; REQUEST] = {
    let mut request = [0; REQUEST];
    request[0] = ENLARGE;
    request
};

/// To attach the tap with this name, with this slot of the area. The answer has the area's
/// descriptor, those of the daemon's two taps (of the VM's frames first), the claim, and links, if
/// it is by links.
pub(super) fn to_attach(tap: &str, slot: u8) -> [u8; REQUEST] {
    let mut request = [0; REQUEST];
    request[..2].copy_from_slice(&[ATTACH, slot]);
    let len = tap.len().min(NAME - 1);
    request[3..3 + len].copy_from_slice(&tap.as_bytes()[..len]);
    request
}

/// The tap to attach, and the slot, if it is such a request.
pub(super) fn read_attach(request: &[u8; REQUEST]) -> Option<(String, u8)> {
    let name = request[3..3 + NAME].split(|byte| *byte == 0).next()?;
    let name = std::str::from_utf8(name).ok().filter(|name| is_ifname(name))?;
    let (is_whole, slot) = (to_attach(name, request[1]) == *request, request[1]);
    (is_whole && usize::from(slot) < SLOTS).then(|| (name.to_owned(), slot))
}

/// To take the programs off the tap with this number, if they are no links; 0: off all taps.
pub(super) fn to_detach(index: u32) -> [u8; REQUEST] {
    let mut request = [0; REQUEST];
    request[0] = DETACH;
    request[3..7].copy_from_slice(&index.to_ne_bytes());
    request
}

/// The number of the tap, if it is such a request.
pub(super) fn read_detach(request: &[u8; REQUEST]) -> Option<u32> {
    let index = u32::from_ne_bytes([request[3], request[4], request[5], request[6]]);
    (to_detach(index) == *request).then_some(index)
}

/// To put an uplink into its bridge.
pub(super) fn to_join(uplink: &UplinkConfig) -> [u8; REQUEST] {
    let mut request = to_open(uplink);
    request[0] = JOIN;
    request
}

/// To open an uplink, made and bridged so; its name and network do not matter.
pub(super) fn to_open(uplink: &UplinkConfig) -> [u8; REQUEST] {
    let UplinkConfig { kind, create, ifname, bridge, .. } = uplink;
    let mut request = [0; REQUEST];
    request[..3].copy_from_slice(&[OPEN, *kind as u8, (*create).into()]);
    let names = [ifname.as_str(), bridge.as_deref().unwrap_or_default()];
    for (to, name) in request[3..].chunks_exact_mut(NAME).zip(names) {
        let len = name.len().min(NAME - 1); // the configuration has no longer ones
        to[..len].copy_from_slice(&name.as_bytes()[..len]);
    }
    request
}

/// The uplink to open. `None`: no configuration has such a one.
pub(super) fn read(request: &[u8; REQUEST]) -> Option<UplinkConfig> {
    let (names, _) = request[3..].as_chunks::<NAME>();
    let name = |bytes: &[u8; NAME]| {
        let len = bytes.iter().position(|byte| *byte == 0)?;
        std::str::from_utf8(&bytes[..len]).ok().map(str::to_owned)
    };
    let (ifname, bridge) = (name(&names[0])?, name(&names[1])?);
    let uplink = UplinkConfig {
        name: String::new(),
        network: None,
        kind: *UplinkKind::ALL.get(usize::from(request[1]))?,
        create: request[2] == 1,
        bridge: Some(bridge).filter(|bridge| !bridge.is_empty()),
        ifname,
    };
    let is_good = is_ifname(&uplink.ifname) && uplink.bridge.iter().all(|name| is_ifname(name));
    (is_good && to_open(&uplink) == *request).then_some(uplink)
}

/// Whether this error of a send means that the other end is gone. All others are of one message
/// alone: ETOOMANYREFS says that all processes of this user together have as many descriptors under
/// way as this one may have open (unix(7)), ENOBUFS and ENOMEM that memory is short.
pub(super) fn is_end(error: &io::Error) -> bool {
    let ends = [Errno::PIPE, Errno::CONNRESET, Errno::NOTCONN];
    error.raw_os_error().is_some_and(|raw| ends.iter().any(|end| end.raw_os_error() == raw))
}

/// For a descriptor that cannot be sent.
fn unsent(error: &io::Error) -> Refusal {
    let is_crowded = error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error());
    let (what, fix) = if is_crowded {
        (
            "processes of this user have sent too many descriptors that nobody has received".into(),
            "give the daemon a user of its own, or try again later",
        )
    } else {
        (format!("the descriptor cannot be sent: {error}"), "try again later")
    };
    Refusal { what, fix: fix.into(), ..Refusal::default() }
}

/// A message that has come.
pub(super) struct Received {
    pub(super) len: usize,
    pub(super) fds: Vec<OwnedFd>,
    /// There was no place for all of its descriptors.
    pub(super) is_cut: bool,
}

/// One end of a pair: messages come whole and in order, and an end that is gone is noticed.
#[derive(Debug)]
pub(super) struct Channel(OwnedFd);

impl Channel {
    /// The caller's end, which waits no longer than `answer_max` for an answer, and the end of the
    /// process that answers.
    pub(super) fn pair(answer_max: Duration) -> io::Result<(Self, Self)> {
        let kind = SocketType::SEQPACKET;
        let (a, b) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&a, Timeout::Recv, Some(answer_max))?;
        Ok((Self(a), Self(b)))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// From now on both ends are as if the other were gone.
    pub(super) fn end(&self) {
        let _ = shutdown(&self.0, Shutdown::Both);
    }

    /// Errors: the other end is gone.
    pub(super) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(bytes, fds, SendFlags::empty())
    }

    /// The same with these flags. WouldBlock: there is no room.
    pub(super) fn send_with(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        let flags = flags | SendFlags::NOSIGNAL;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ErrorKind::InvalidInput.into());
        }
        loop {
            match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags) {
                Err(Errno::INTR) => {}
                result => return result.map(drop).map_err(Into::into),
            }
        }
    }

    /// Gives the other end an answer, or a refusal if the answer's descriptor cannot be sent.
    /// Errors: it is gone, or cannot be told even that.
    pub(super) fn say(&self, answer: &Answer) -> io::Result<()> {
        match answer {
            Ok(given) => {
                let [a, b, c, d] = given.as_ref().map_or(0, |it| it.index).to_ne_bytes();
                let fds = given.iter().flat_map(|it| [&it.fd].into_iter().chain(&it.more));
                match self.send(&[DONE, a, b, c, d], &fds.map(AsFd::as_fd).collect::<Vec<_>>()) {
                    Err(e) if !is_end(&e) => self.say(&Err(unsent(&e))),
                    sent => sent,
                }
            }
            Err(Refusal { what, fix, is_busy, is_final }) => {
                let how = [(BUSY, *is_busy), (FINAL, *is_final)];
                let kind = how.iter().filter(|it| it.1).fold(REFUSED, |kind, it| kind | it.0);
                let text = [&[kind], what.as_bytes(), &[0], fix.as_bytes()].concat();
                self.send(&text[..text.len().min(ANSWER)], &[])
            }
        }
    }

    /// The other end's next answer. Errors: it is gone; `TimedOut`: it is taken for gone.
    pub(super) fn hear(&self) -> io::Result<Answer> {
        let mut bytes = [0; ANSWER];
        let Received { len, fds, is_cut } = self.receive(&mut bytes).map_err(|e| {
            if e.kind() != ErrorKind::WouldBlock {
                return e;
            }
            self.end();
            ErrorKind::TimedOut.into()
        })?;
        if is_cut {
            return Ok(Err(Refusal {
                what: "no descriptor is free".into(),
                fix: "raise the daemon's limit (LimitNOFILE=)".into(),
                ..Refusal::default()
            }));
        }
        let (kind, text) = (bytes[0], String::from_utf8_lossy(&bytes[1..len]));
        if kind == DONE {
            let index = bytes[1..len].first_chunk().map_or(0, |index| u32::from_ne_bytes(*index));
            let mut fds = fds.into_iter();
            return Ok(Ok(fds.next().map(|fd| Given { fd, more: fds.collect(), index })));
        }
        let (what, fix) = text.split_once('\0').unwrap_or((&text, "report this"));
        let (is_busy, is_final) = (kind & BUSY != 0, kind & FINAL != 0);
        Ok(Err(Refusal { what: what.into(), fix: fix.into(), is_busy, is_final }))
    }

    /// The next request. Errors: the other end is gone.
    pub(super) fn recv(&self, to: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
        self.receive(to).map(|received| received.fds)
    }

    fn receive(&self, to: &mut [u8]) -> io::Result<Received> {
        self.receive_with(to, RecvFlags::empty())
    }

    /// The next message, in another way. WouldBlock: there is none.
    pub(super) fn receive_with(&self, to: &mut [u8], flags: RecvFlags) -> io::Result<Received> {
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            let mut to = [IoSliceMut::new(to)];
            match recvmsg(&self.0, &mut to, &mut control, flags) {
                Err(Errno::INTR) => {}
                result => break result?,
            }
        };
        if got.bytes == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let is_cut = got.flags.contains(ReturnFlags::CTRUNC);
        Ok(Received { len: got.bytes, fds: fds.flatten().collect(), is_cut })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an answer that comes.
    const LIMIT: Duration = Duration::from_secs(20);

    fn uplink(kind: UplinkKind, ifname: &str, bridge: Option<&str>) -> UplinkConfig {
        let (name, bridge) = (String::new(), bridge.map(Into::into));
        UplinkConfig { name, network: None, kind, ifname: ifname.into(), create: true, bridge }
    }

    #[test]
    fn a_request_says_what_an_uplink_is_and_nothing_else_is_one() {
        let tap = uplink(UplinkKind::Tap, "np0", Some("br0"));
        let long = uplink(UplinkKind::Macvtap, "fifteen-bytes-x", None);
        for it in [&tap, &long, &UplinkConfig { create: false, ..tap.clone() }] {
            assert_eq!(read(&to_open(it)).as_ref(), Some(it));
        }
        let request = to_open(&tap);
        for (at, byte) in [(0, ENLARGE), (1, 2), (2, 2), (3, 0), (3, b'/'), (4, 0xff), (18, b'x')] {
            let mut bad = request;
            bad[at] = byte;
            assert_eq!(read(&bad), None, "{at} {byte}");
        }
        // Behind the zero, where the kernel would not look.
        let mut hidden = request;
        hidden[10] = b'x';
        assert_eq!(read(&hidden), None);
    }

    #[test]
    fn a_request_to_attach_names_a_tap_and_a_slot() {
        for tap in ["vnet0", "fifteen-bytes-x"] {
            assert_eq!(read_attach(&to_attach(tap, 251)), Some((tap.to_owned(), 251)));
        }
        let request = to_attach("vnet0", 3);
        let slot = u8::try_from(SLOTS).unwrap();
        let bytes = [(0, OPEN), (1, slot), (2, 1), (3, b'/'), (4, 0xff), (9, b'x'), (20, b'x')];
        for (at, byte) in bytes {
            let mut bad = request;
            bad[at] = byte;
            assert_eq!(read_attach(&bad), None, "{at} {byte}");
        }
    }

    #[test]
    fn a_request_to_detach_has_a_number_and_nothing_else() {
        let request = to_detach(0x0102_0304);
        assert_eq!(read_detach(&request), Some(0x0102_0304));
        for at in [0, 1, 2, 7, REQUEST - 1] {
            let mut bad = request;
            bad[at] ^= 1;
            assert_eq!(read_detach(&bad), None, "{at}");
        }
    }

    #[test]
    fn an_answer_is_a_descriptor_or_a_reason() {
        let (b, a) = Channel::pair(LIMIT).unwrap();
        let fd = a.fd().try_clone_to_owned().unwrap();
        a.say(&Ok(Some(Given { fd, more: Vec::new(), index: 0x0102_0304 }))).unwrap();
        assert_eq!(b.hear().unwrap().unwrap().unwrap().index, 0x0102_0304);
        a.say(&Ok(None)).unwrap();
        assert!(b.hear().unwrap().unwrap().is_none());
        for (what, is_busy) in [("no".to_owned(), true), ("n".repeat(2 * ANSWER), false)] {
            let fix = if is_busy { "wait" } else { "report this" };
            let refusal =
                Refusal { what: what.clone(), fix: "wait".into(), is_busy, is_final: !is_busy };
            a.say(&Err(refusal)).unwrap();
            let said = b.hear().unwrap().unwrap_err();
            assert!(what.starts_with(&said.what), "{}", said.what);
            assert_eq!((said.is_busy, said.is_final, &*said.fix), (is_busy, !is_busy, fix));
        }
    }

    #[test]
    fn only_an_end_that_is_gone_is_one() {
        let (b, a) = Channel::pair(LIMIT).unwrap();
        drop(b);
        assert!(is_end(&a.say(&Ok(None)).unwrap_err()));
        for passes in [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM] {
            let error = io::Error::from(passes);
            assert!(!is_end(&error), "{error}");
            assert!(!unsent(&error).is_final);
        }
    }

    #[test]
    fn messages_keep_their_bounds_and_an_end_is_noticed() {
        let (b, a) = Channel::pair(LIMIT).unwrap();
        let mut bytes = [0; ANSWER];
        a.send(b"one", &[]).unwrap();
        a.send(b"two", &[a.fd()]).unwrap();
        let one = b.receive(&mut bytes).unwrap();
        assert_eq!((&bytes[..one.len], one.fds.len()), (&b"one"[..], 0));
        let two = b.receive(&mut bytes).unwrap();
        assert_eq!((&bytes[..two.len], two.fds.len()), (&b"two"[..], 1));
        drop((a, two));
        assert!(b.receive(&mut bytes).is_err() && b.send(b"three", &[]).is_err());
    }

    #[test]
    fn an_answer_that_is_late_ends_both_ends() {
        let (asks, answers) = Channel::pair(Duration::from_millis(10)).unwrap();
        asks.send(b"one", &[]).unwrap();
        assert_eq!(asks.hear().unwrap_err().kind(), ErrorKind::TimedOut);
        answers.recv(&mut [0; 3]).unwrap();
        answers.say(&Ok(None)).unwrap_err();
        assert_eq!(asks.hear().unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn an_answer_whose_descriptor_finds_no_place_is_no_and_not_the_end() {
        let (b, a) = Channel::pair(LIMIT).unwrap();
        // More than there is place for is the same to the reader as none free.
        let many = [a.fd(); FDS_MAX + 20];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX + 20))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        sendmsg(a.fd(), &[IoSlice::new(&[DONE])], &mut control, SendFlags::empty()).unwrap();
        let no = b.hear().unwrap().unwrap_err();
        assert!(no.what.contains("no descriptor is free") && !no.is_final, "{no:?}");
        a.say(&Ok(None)).unwrap();
        assert!(b.hear().unwrap().unwrap().is_none());
    }
}
