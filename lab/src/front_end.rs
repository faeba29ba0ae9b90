//! Our own VMM for vhost-user: a front-end's messages, so that a back-end serves rings that a
//! program of the lab drives, without a guest.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

/// Requests of the vhost-user protocol.
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
/// VIRTIO_F_VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES; REPLY_ACK.
const FEATURES: u64 = 1 << 32 | 1 << 30;
const PROTOCOL_FEATURES: u64 = 1 << 3;
/// VIRTIO_F_EVENT_IDX.
pub(crate) const EVENT_IDX: u64 = 1 << 29;
/// Where guest and VMM see the memory.
pub(crate) const AT_GUEST: u64 = 0x4000_0000;
const AT_VMM: u64 = 0x7f12_3400_0000;

/// A ring: where it is in the memory, from its beginning on, and its notifications.
#[derive(Debug)]
pub(crate) struct RingAt<'a> {
    pub(crate) size: u16,
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
    pub(crate) kick: &'a EventFd,
    pub(crate) call: &'a EventFd,
}

/// A connection to a back-end. Rings run as long as it lasts.
#[derive(Debug)]
pub(crate) struct FrontEnd {
    stream: UnixStream,
}

impl FrontEnd {
    /// Connects, and starts these rings, with these features besides what every driver has.
    ///
    /// # Errors
    /// Nobody listens, or the back-end takes no message.
    pub(crate) fn connect(
        socket: &Path,
        features: u64,
        memory: &File,
        rings: &[RingAt<'_>],
    ) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        let (it, len) = (Self { stream }, memory.metadata()?.len());
        it.say(SET_OWNER, &[], None)?;
        it.say(SET_PROTOCOL_FEATURES, &[PROTOCOL_FEATURES], None)?;
        it.say(SET_FEATURES, &[FEATURES | features], None)?;
        it.say(SET_MEM_TABLE, &[1, AT_GUEST, len, AT_VMM, 0], Some(memory.as_raw_fd()))?;
        for (index, ring) in (0..).zip(rings) {
            let [descriptors, available, used] =
                [ring.descriptors, ring.available, ring.used].map(|offset| AT_VMM + offset);
            it.say(SET_VRING_NUM, &[index | u64::from(ring.size) << 32], None)?;
            it.say(SET_VRING_BASE, &[index], None)?;
            it.say(SET_VRING_ADDR, &[index, descriptors, used, available, 0], None)?;
            it.say(SET_VRING_CALL, &[index], Some(ring.call.as_raw_fd()))?;
            it.say(SET_VRING_KICK, &[index], Some(ring.kick.as_raw_fd()))?;
            it.say(SET_VRING_ENABLE, &[index | 1 << 32], None)?;
        }
        Ok(it)
    }

    /// Two fields of 32 bits are one word here, the first in its low half.
    fn say(&self, request: u32, body: &[u64], fd: Option<RawFd>) -> Result<()> {
        let bytes = u32::try_from(8 * body.len()).expect("a few words");
        let mut message: Vec<u8> =
            [request, 1, bytes].into_iter().flat_map(u32::to_le_bytes).collect();
        message.extend(body.iter().flat_map(|word| word.to_le_bytes()));
        let fds: Vec<RawFd> = fd.into_iter().collect();
        let control = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &[][..] } else { &control[..] };
        let parts = [IoSlice::new(&message)];
        let (to, flags) = (self.stream.as_raw_fd(), MsgFlags::MSG_NOSIGNAL);
        let sent = sendmsg::<()>(to, &parts, control, flags, None)?;
        ensure!(sent == message.len(), "the daemon took {sent} bytes of {}", message.len());
        Ok(())
    }
}

/// Memory that cannot be shrunk, as QEMU's guests have it.
pub(crate) fn memory(len: u64) -> Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let memory = File::from(memfd_create("guest", flags)?);
    memory.set_len(len)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    fcntl(&memory, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(memory)
}

/// A descriptor for notifications.
pub(crate) fn notifier() -> Result<EventFd> {
    Ok(EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?)
}
