//! Turns the frames of a tap that is already there to the daemon, and the daemon's frames back.
//!
//! The tap of a running VM stays where it is: in its bridge, or routed. Its VMM, its bridge and its
//! counters are as before. Three small programs in the kernel ([`code`], from `bpf/turn.bpf.c`) are
//! loaded for it:
//!
//! ```text
//! VM → tap, ingress ─turn→ `from_vm` → daemon → `to_net` ─back→ ingress of the tap → bridge
//! bridge → tap, egress ─turn→ `to_net` → daemon → `from_vm` ─back→ egress of the tap → VM
//! ```
//!
//! `from_vm` and `to_net` are taps of the daemon ([`tap`]), with virtio-net headers. A frame that
//! the daemon writes there gets a mark, by which the programs of the VM's tap know it: they clear
//! the mark and let the frame pass. A frame is never in two places. A turned frame gets the mark,
//! too: the third program, `only`, drops what the host itself would send there (the kernel reports
//! groups of IPv6, others discover their neighbours).
//!
//! **A dead or hung daemon is a plain wire.** The [`area`] is memory of the programs and the
//! daemon. A program notes there when it turned the first frame since the daemon was last awake;
//! the daemon stores 0 when it begins to work and before it sleeps. A frame that finds a time older
//! than the limit goes its plain way, is counted, and marks its connection if it is a segment of
//! TCP. So nobody has to watch the daemon, an idle daemon is not woken, and a daemon that is back
//! knows that frames passed, and of which connections.
//!
//! **The holder.** With tcx (Linux 6.6) a program is on its hook as long as somebody has the
//! descriptor of its link. The daemon alone has it, so the kernel takes the programs away when the
//! daemon ends. Older kernels have filters of `clsact` ([`tc`]), which stay: then the limit alone
//! makes the wire plain, until somebody takes the filters away.
//!
//! **Detaching** loses nothing in this order: what was turned is given back; the links end, or the
//! filters are taken away; the daemon goes on giving back for a while ([`LINGER`]), and then closes
//! its taps. For a program that was about to turn a frame does so, and the kernel has a queue of
//! frames that were written to a tap, which it loses with the tap. A frame that passes plain just
//! then may overtake the last ones that are given back.
//!
//! No clang, libbpf or ELF is needed to build or to run: the code is a text of some 260
//! instructions ([`code`]), its constants are put in when it is loaded, and three commands of
//! bpf(2) load it ([`bpf`]). A library for that (aya, libbpf-rs) brings a reader of ELF and BTF
//! into a program with privileges, and finds interfaces by name, where another one may be by then.

pub mod area;
mod bpf;
mod claim;
pub mod code;
mod netlink;
pub mod tap;
mod tc;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::libc;

use crate::area::Area;
use crate::code::{Constants, Program};
use crate::netlink::Netlink;
use crate::tap::Tap;
pub use crate::tc::Filters;

/// Where a program runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Hook {
    /// Frames that the interface has received.
    Ingress,
    /// Frames that it is to send.
    Egress,
}

/// How programs are put on their hooks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// By links, which end with the process that has them.
    Tcx,
    /// By filters of `clsact`, for kernels before 6.6.
    Clsact,
}

impl Way {
    /// The better one that this kernel has.
    ///
    /// # Errors
    /// The process may not load programs.
    pub fn of_this_kernel() -> Result<Self, AttachError> {
        let has_links = bpf::has_tcx().map_err(|e| AttachError::of("load programs", e))?;
        Ok(if has_links { Self::Tcx } else { Self::Clsact })
    }
}

/// A way, with what it needs. Made before the process gives its system calls away.
#[derive(Debug)]
pub struct Hooks(Option<Arc<Netlink>>);

impl Hooks {
    /// By links, or by filters, which take a socket.
    ///
    /// # Errors
    /// There is no socket.
    pub fn by(way: Way) -> Result<Self, AttachError> {
        let netlink = || Netlink::open().map(Arc::new);
        let netlink = (way == Way::Clsact).then(netlink).transpose();
        netlink.map(Self).map_err(|e| AttachError::of("open a netlink socket", e))
    }

    /// Takes away what a daemon that has ended has left at the interface with this number, if
    /// nobody has attached it now. Links leave nothing.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take_left(&self, index: u32) -> Result<(), AttachError> {
        let Some(netlink) = &self.0 else { return Ok(()) };
        let Ok(_claim) = claim::claim(index) else { return Ok(()) };
        tc::take_all_left(netlink, index)
    }
}

/// A tap whose frames are to be turned.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The interface's number: by the time, another may have the name.
    pub index: u32,
    /// The place of its counts in the area.
    pub slot: usize,
    /// The mark of the daemon's frames: random, so that nobody else has it, and not 0.
    pub mark: u32,
}

/// An attached tap. Dropped, it is plain again if it has links.
#[derive(Debug)]
pub struct Attached {
    /// The tap with the VM's frames.
    pub from_vm: Tap,
    /// The tap with the network's.
    pub to_net: Tap,
    /// The programs' holds.
    pub held: Held,
    /// Nobody else attaches the tap as long as it is open.
    pub claim: OwnedFd,
}

/// The holds of the programs on their hooks.
#[derive(Debug)]
pub enum Held {
    /// Those of the VM's tap behind the others.
    Links(Vec<OwnedFd>),
    /// To be taken away by [`Filters::remove`].
    Filters(Filters),
}

/// Why a tap cannot be attached. The text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The interface has gone.
    #[error("there is no such interface any more\n    fix: start the VM, then attach again")]
    NoInterface,
    /// The process may not.
    #[error(
        "not allowed to load or link programs ({0})\n    fix: run with CAP_NET_ADMIN and CAP_BPF"
    )]
    NotAllowed(&'static str),
    /// Another process has the claim on the tap with this number.
    #[error(
        "another nightporterd has attached it\n    fix: detach it there (nightporter --control \
         SOCKET detach TAP); ss -xap | grep {} tells which process that is", claim::name(*.0)
    )]
    Claimed(u32),
    /// A qdisc excludes `clsact`.
    #[error(
        "an ingress qdisc is in the way (libvirt's <bandwidth> makes one)\n    fix: remove the \
         inbound <bandwidth> of the interface (tc qdisc del dev IFACE ingress), or use Linux 6.6, \
         where both can be there"
    )]
    IngressQdisc,
    /// Somebody else has a filter at the first place.
    #[error(
        "another filter of preference 1 is there\n    fix: move it to another preference (tc \
         filter show dev IFACE ingress, and egress), or use Linux 6.6"
    )]
    Filter,
    /// Something else.
    #[error("cannot {0}: {1}\n    fix: use Linux 6.1 or later with BPF, and report this")]
    System(&'static str, #[source] io::Error),
}

impl AttachError {
    /// Of a system call to do `what`.
    #[must_use]
    pub fn of(what: &'static str, error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENODEV) => Self::NoInterface,
            Some(libc::EPERM) => Self::NotAllowed(what),
            _ => Self::System(what, error),
        }
    }
}

/// Attaches a tap of this network namespace. The first frame may be turned before it returns, so
/// the area's limit has to be set. The programs of the daemon's taps come first: a frame that is
/// turned then has its way back.
///
/// # Errors
/// Nothing is attached.
pub fn attach(hooks: &Hooks, area: &Area, request: &Request) -> Result<Attached, AttachError> {
    let claim = claim::claim(request.index)?;
    let from_vm = Tap::make(tap::FROM_VM)?;
    let to_net = Tap::make(tap::TO_NET)?;
    let load = |program, target: u32, flags| {
        let constants = Constants {
            mark: request.mark,
            target,
            flags,
            area: area.fd().as_raw_fd(),
            plain_at: area::plain_at(request.slot, program),
        };
        let code = code::of(program).with(&constants);
        bpf::load(program.name(), &code).map_err(|e| AttachError::of("load programs", e))
    };
    let into_net = load(Program::Back, request.index, INGRESS)?;
    let into_vm = load(Program::Back, request.index, 0)?;
    let out_of_net = load(Program::TurnFromNet, to_net.index(), 0)?;
    let out_of_vm = load(Program::TurnFromVm, from_vm.index(), 0)?;
    let only = load(Program::Only, 0, 0)?;
    let mut held = match &hooks.0 {
        None => Held::Links(Vec::new()),
        Some(netlink) => {
            Held::Filters(Filters::new(Arc::clone(netlink), request.index, request.mark))
        }
    };
    // Before they come up: the host says something at once.
    held.add(to_net.index(), Hook::Egress, &only)?;
    held.add(from_vm.index(), Hook::Egress, &only)?;
    held.add(to_net.index(), Hook::Ingress, &into_net)?;
    held.add(from_vm.index(), Hook::Ingress, &into_vm)?;
    to_net.bring_up()?;
    from_vm.bring_up()?;
    held.add(request.index, Hook::Egress, &out_of_net)?;
    held.add(request.index, Hook::Ingress, &out_of_vm)?;
    Ok(Attached { from_vm, to_net, held, claim })
}

impl Held {
    fn add(&mut self, index: u32, hook: Hook, program: &OwnedFd) -> Result<(), AttachError> {
        match self {
            Self::Links(links) => {
                let link = bpf::link(program, index, hook);
                links.push(link.map_err(|e| AttachError::of("link programs", e))?);
                Ok(())
            }
            Self::Filters(filters) => filters.add(index, hook, program),
        }
    }
}

/// The daemon's taps are closed so long after a tap was detached: the kernel has worked on all
/// frames that it had then long before.
pub const LINGER: Duration = Duration::from_secs(1);

/// `BPF_F_INGRESS` (linux/bpf.h).
const INGRESS: u32 = 1;
