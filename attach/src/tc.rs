//! Programs as filters of the qdisc `clsact` (tc(8)), for kernels without tcx.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc;

use crate::netlink::{NLM_F_CREATE, NLM_F_EXCL, attribute, request};
use crate::{AttachError, Hook};

// include/uapi/linux/rtnetlink.h, pkt_sched.h, pkt_cls.h.
const RTM_NEWQDISC: u16 = 36;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
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
/// The filter's number at that place.
const HANDLE: u32 = 1;
const ETH_P_ALL: u16 = 3;

/// The filters of a tap that is attached.
#[derive(Debug)]
pub struct Filters {
    index: u32,
    added: Vec<Hook>,
}

impl Filters {
    /// For the interface with this number, none yet.
    pub(crate) const fn new(index: u32) -> Self {
        Self { index, added: Vec::new() }
    }

    /// One more, here or at an interface of the daemon.
    pub(crate) fn add(
        &mut self,
        index: u32,
        hook: Hook,
        program: &OwnedFd,
    ) -> Result<(), AttachError> {
        // That it is there is no error, unless it is `ingress`, which has the same handle.
        request(RTM_NEWQDISC, NLM_F_CREATE, &clsact(index)).map_err(|e| {
            let _ = self.remove();
            match e.raw_os_error() {
                Some(libc::EINVAL) => AttachError::IngressQdisc,
                _ => AttachError::of("add the qdisc clsact", e),
            }
        })?;
        let options = [
            attribute(TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes()),
            attribute(TCA_BPF_NAME, b"nightporter\0"),
            attribute(TCA_BPF_FLAGS, &ACT_DIRECT.to_ne_bytes()),
        ];
        let body = [
            message(index, HANDLE, parent(hook), PREFERENCE << 16 | u32::from(ETH_P_ALL.to_be())),
            attribute(TCA_KIND, b"bpf\0"),
            attribute(TCA_OPTIONS, &options.concat()),
        ];
        let added = request(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_EXCL, &body.concat());
        added.map_err(|e| {
            let _ = self.remove();
            match e.raw_os_error() {
                Some(libc::EEXIST) => AttachError::Filter,
                _ => AttachError::of("add a filter", e),
            }
        })?;
        if index == self.index {
            self.added.push(hook);
        }
        Ok(())
    }

    /// Takes them away: the tap is plain again. The qdisc stays, others may use it, and so do
    /// filters of others.
    ///
    /// # Errors
    /// The interface has gone, or somebody else has taken one away.
    pub fn remove(&self) -> io::Result<()> {
        let info = PREFERENCE << 16 | u32::from(ETH_P_ALL.to_be());
        let one = |&hook: &Hook| {
            request(RTM_DELTFILTER, 0, &message(self.index, HANDLE, parent(hook), info))
        };
        self.added.iter().map(one).fold(Ok(()), io::Result::and)
    }
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
