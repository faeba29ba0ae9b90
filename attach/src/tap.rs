//! The taps of the daemon to which frames are turned.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::AttachError;

/// The beginning of the names of taps with the VMs' frames; the kernel adds a number.
pub const FROM_VM: &str = "npv";
/// The same for those with the network's frames.
pub const TO_NET: &str = "npn";

/// linux/if_tun.h: the reader's features, CSUM, TSO4, TSO6, TSO_ECN.
const OFFLOADS: u64 = 0x01 | 0x02 | 0x04 | 0x08;
/// USO4 and USO6, since Linux 6.2.
const USO: u64 = 0x20 | 0x40;
/// Bytes of a virtio-net header without `num_buffers`.
static HEADER: libc::c_int = 10;
/// Little-endian.
static ONE: libc::c_int = 1;

mod ioctl {
    use nix::libc;
    nix::ioctl_write_int!(set_iff, b'T', 202);
    nix::ioctl_write_int!(set_offload, b'T', 208);
    nix::ioctl_read!(iff, b'T', 210, libc::c_uint);
    nix::ioctl_write_ptr!(set_vnet_hdr_size, b'T', 216, libc::c_int);
    nix::ioctl_write_ptr!(set_vnet_le, b'T', 220, libc::c_int);
    nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);
}

/// A tap that is there as long as it is open: a whole frame with its virtio-net header per read and
/// write, neither of which waits.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
    index: u32,
}

impl Tap {
    /// Makes a new one, whose name begins so. It is down.
    ///
    /// # Errors
    /// The process may not.
    pub(crate) fn make(name: &str) -> Result<Self, AttachError> {
        let failed = |e| AttachError::of("make a tap", e);
        let new = || {
            let tap = Self::open(&format!("{name}%d"), libc::IFF_TUN_EXCL)?;
            if tap.set_offloads(OFFLOADS | USO).is_err() {
                tap.set_offloads(OFFLOADS)?;
            }
            Ok(tap)
        };
        new().map_err(failed)
    }

    /// Brings it up.
    pub(crate) fn bring_up(&self) -> Result<(), AttachError> {
        let failed = |e| AttachError::of("bring a tap up", e);
        let flags = libc::c_short::try_from(libc::IFF_UP | libc::IFF_NOARP).expect("16 bits");
        let request = request(&self.name, flags);
        let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None);
        let socket = socket.map_err(|e| failed(e.into()))?;
        // SAFETY: the kernel reads one ifreq that outlives the call.
        // JUSTIFICATION: no crate wraps this ioctl.
        let done = unsafe { ioctl::set_flags(socket.as_raw_fd(), &raw const request) };
        done.map(drop).map_err(|e| failed(e.into()))
    }

    /// A tap as a VMM opens it, with these features of its reader (TUNSETOFFLOAD): for tests.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of_vmm(name: &str, offloads: u64) -> io::Result<Self> {
        let tap = Self::open(name, 0)?;
        tap.set_offloads(offloads)?;
        Ok(tap)
    }

    fn open(name: &str, flags: libc::c_int) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let file = options.open("/dev/net/tun")?;
        let name = set_up(&file, name, flags)?;
        let index = if_nametoindex(name.as_str())?;
        Ok(Self { file, name, index })
    }

    fn set_offloads(&self, offloads: u64) -> io::Result<()> {
        // SAFETY: the call takes its argument by value.
        // JUSTIFICATION: no crate wraps this ioctl.
        unsafe { ioctl::set_offload(self.file.as_raw_fd(), offloads) }?;
        Ok(())
    }

    /// The open tap.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// The interface's number.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// The open tap, by itself.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.file.into()
    }
}

/// The name of an open tap, wherever it was opened.
///
/// # Errors
/// It is none.
pub fn name_of(fd: BorrowedFd<'_>) -> io::Result<String> {
    let mut request = request("", 0);
    // TUNGETIFF is declared as reading an int but writes an ifreq.
    let pointer = (&raw mut request).cast();
    // SAFETY: the kernel writes one ifreq behind the pointer, which outlives the call.
    // JUSTIFICATION: no crate wraps this ioctl.
    unsafe { ioctl::iff(fd.as_raw_fd(), pointer) }?;
    name_in(&request)
}

/// Makes it a tap, with this pattern for its name. The name.
fn set_up(file: &File, pattern: &str, flags: libc::c_int) -> io::Result<String> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | flags;
    let ifru_flags = u16::try_from(flags).expect("16 bits").cast_signed();
    let mut request = request(pattern, ifru_flags);
    let fd = file.as_raw_fd();
    // TUNSETIFF is declared as writing an int but takes a pointer to ifreq.
    let pointer = &raw mut request;
    // SAFETY: the kernel reads and writes one ifreq behind the pointer, and reads one int behind
    // each of the others, all of which outlive the calls.
    // JUSTIFICATION: no crate wraps these ioctls.
    unsafe {
        ioctl::set_iff(fd, pointer.addr() as u64)?;
        ioctl::set_vnet_hdr_size(fd, &raw const HEADER)?;
        ioctl::set_vnet_le(fd, &raw const ONE)?;
    }
    name_in(&request)
}

fn name_in(request: &libc::ifreq) -> io::Result<String> {
    let name = request.ifr_name.iter().take_while(|byte| **byte != 0);
    let name = name.flat_map(|byte| byte.to_ne_bytes()).collect();
    String::from_utf8(name).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// An `ifreq` with these flags (netdevice(7)).
fn request(name: &str, ifru_flags: libc::c_short) -> libc::ifreq {
    let mut ifr_name = [0; libc::IFNAMSIZ];
    for (to, from) in ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    libc::ifreq { ifr_name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags } }
}
