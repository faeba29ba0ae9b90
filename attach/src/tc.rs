//! Programs as filters of the qdisc `clsact` (tc(8)), for kernels without tcx.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::libc;

use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL, Netlink, attribute, value};
use crate::{AttachError, Hook};

// include/uapi/linux/rtnetlink.h, pkt_sched.h, pkt_cls.h.
const RTM_NEWQDISC: u16 = 36;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
/// The program's result is the verdict.
const ACT_DIRECT: u32 = 1;
const CLSACT: u32 = 0xffff_fff1;
const CLSACT_HANDLE: u32 = 0xffff_0000;
const INGRESS: u32 = 0xffff_fff2;
const EGRESS: u32 = 0xffff_fff3;
/// The first place.
const PREFERENCE: u32 = 1;
/// The name of filters that are ours, with its zero.
const NAME: &[u8] = b"nightporter\0";
const ETH_P_ALL: u16 = 3;
const HOOKS: [Hook; 2] = [Hook::Ingress, Hook::Egress];
/// Bytes of a `struct tcmsg`.
const MESSAGE: usize = 20;

/// The filters of a tap that is attached.
#[derive(Debug)]
pub struct Filters {
    netlink: Arc<Netlink>,
    index: u32,
    /// Their number at their place: whoever attaches the tap next has another one.
    handle: u32,
    added: Vec<Hook>,
}

impl Filters {
    /// For the interface with this number, none yet.
    pub(crate) const fn new(netlink: Arc<Netlink>, index: u32, handle: u32) -> Self {
        Self { netlink, index, handle, added: Vec::new() }
    }

    /// One more, here or at an interface of the daemon. Those that a daemon which was killed has
    /// left here go.
    pub(crate) fn add(
        &mut self,
        index: u32,
        hook: Hook,
        program: &OwnedFd,
    ) -> Result<(), AttachError> {
        self.try_to_add(index, hook, program).inspect_err(|_| drop(self.remove()))?;
        if index == self.index {
            self.added.push(hook);
        }
        Ok(())
    }

    fn try_to_add(&self, index: u32, hook: Hook, program: &OwnedFd) -> Result<(), AttachError> {
        // That it is there is no error, unless it is `ingress`, which has the same handle.
        let added = self.netlink.request(RTM_NEWQDISC, NLM_F_CREATE, &clsact(index));
        added.map_err(|e| match e.raw_os_error() {
            Some(libc::EINVAL) => AttachError::IngressQdisc,
            _ => AttachError::of("add the qdisc clsact", e),
        })?;
        if !take_left(&self.netlink, index, hook)? {
            return Err(AttachError::Filter);
        }
        let options = [
            attribute(TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes()),
            attribute(TCA_BPF_NAME, NAME),
            attribute(TCA_BPF_FLAGS, &ACT_DIRECT.to_ne_bytes()),
        ];
        let body = [
            message(index, self.handle, parent(hook), place()),
            attribute(TCA_KIND, b"bpf\0"),
            attribute(TCA_OPTIONS, &options.concat()),
        ];
        let added = self.netlink.request(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_EXCL, &body.concat());
        added.map_err(|e| AttachError::of("add a filter", e))
    }

    /// Takes them away: the tap is plain again. The qdisc stays, others may use it, and so do
    /// filters of others.
    ///
    /// # Errors
    /// The interface has gone, or somebody else has taken one away.
    pub fn remove(&self) -> io::Result<()> {
        let one = |&hook: &Hook| remove(&self.netlink, self.index, self.handle, hook);
        self.added.iter().map(one).fold(Ok(()), io::Result::and)
    }
}

/// Takes away the filters that a daemon which has ended has left at an interface.
pub(crate) fn take_all_left(netlink: &Netlink, index: u32) -> Result<(), AttachError> {
    HOOKS.into_iter().try_for_each(|hook| take_left(netlink, index, hook).map(drop))
}

/// Takes away ours at the first place of a hook. `false`: somebody else's are there.
fn take_left(netlink: &Netlink, index: u32, hook: Hook) -> Result<bool, AttachError> {
    let (mut ours, mut is_free) = (Vec::new(), true);
    let mut note = |body: &[u8]| {
        let Some((head, attributes)) = body.split_first_chunk::<MESSAGE>() else { return };
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
        let (handle, info) = (word(8), word(16));
        if info >> 16 != PREFERENCE {
            return;
        }
        let name = value(attributes, TCA_OPTIONS).and_then(|it| value(it, TCA_BPF_NAME));
        match (value(attributes, TCA_KIND), name) {
            (_, Some(NAME)) => ours.push(handle),
            // The list itself, in which they are.
            (Some(b"bpf\0"), None) if handle == 0 => {}
            _ => is_free = false,
        }
    };
    let listed = netlink.list(RTM_GETTFILTER, &message(index, 0, parent(hook), 0), &mut note);
    listed.map_err(|e| AttachError::of("list filters", e))?;
    for handle in ours {
        let removed = remove(netlink, index, handle, hook);
        removed.map_err(|e| AttachError::of("take a filter away", e))?;
    }
    Ok(is_free)
}

fn remove(netlink: &Netlink, index: u32, handle: u32, hook: Hook) -> io::Result<()> {
    netlink.request(RTM_DELTFILTER, 0, &message(index, handle, parent(hook), place()))
}

/// The place and protocols of ours.
const fn place() -> u32 {
    PREFERENCE << 16 | ETH_P_ALL.to_be() as u32
}

const fn parent(hook: Hook) -> u32 {
    match hook {
        Hook::Ingress => INGRESS,
        Hook::Egress => EGRESS,
    }
}

fn clsact(index: u32) -> Vec<u8> {
    [message(index, CLSACT_HANDLE, CLSACT, 0), attribute(TCA_KIND, b"clsact\0")].concat()
}

/// A `struct tcmsg`.
fn message(index: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    [0, index, handle, parent, info].map(u32::to_ne_bytes).concat()
}
