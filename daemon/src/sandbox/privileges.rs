//! Capabilities: those of capabilities(7) that a running daemon needs, of those that it was given.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities,
    set_no_new_privs,
};

use crate::config::DaemonConfig;
use crate::start::{StartError, error};

/// What a daemon with this configuration can use:
///
/// - CAP_NET_ADMIN for uplinks, which may come at any time, and come back. What else it would allow
///   takes system calls that there are no more (`calls`).
/// - CAP_CHOWN for sockets that get another owner or group; a member of the group needs none.
/// - For sockets of another user, which may stay behind when a daemon is killed, and whose
///   directories may be that user's: CAP_FOWNER and CAP_DAC_OVERRIDE, where files may be opened at
///   all (`files`).
fn needed(daemon: &DaemonConfig) -> CapabilitySet {
    let mut needed = CapabilitySet::NET_ADMIN;
    if daemon.socket_group.is_some() || daemon.socket_user.is_some() {
        needed |= CapabilitySet::CHOWN;
    }
    if daemon.socket_user.is_some() {
        needed |= CapabilitySet::FOWNER | CapabilitySet::DAC_OVERRIDE;
    }
    needed
}

/// Gives all other capabilities away, and the ways to get any.
pub(super) fn reduce(daemon: &DaemonConfig) -> Result<(), StartError> {
    // So that the worker can have its priority without CAP_SYS_NICE; whoever may not raise the
    // limit learns of it when that priority is set.
    let priority = daemon.rt_priority.into();
    if getrlimit(Resource::RLIMIT_RTPRIO).is_ok_and(|(soft, _)| soft < priority) {
        let _ = setrlimit(Resource::RLIMIT_RTPRIO, priority, priority);
    }
    let reduce = || {
        let needed = capabilities(None)?.permitted & needed(daemon);
        clear_ambient_capability_set()?;
        set(needed, needed)?;
        set_no_new_privs(true)
    };
    reduce().map_err(|e| error(format!("cannot give privileges away: {e}"), "report this"))
}

fn set(permitted: CapabilitySet, effective: CapabilitySet) -> rustix::io::Result<()> {
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective, permitted, inheritable })
}

/// Does `what` while this thread has no capabilities: nothing that takes one can be done with a
/// socket made so (netlink_ns_capable() of net/netlink/af_netlink.c asks who opened it, 6.18).
pub(crate) fn without_any<T>(what: impl FnOnce() -> T) -> T {
    let Ok(CapabilitySets { permitted, effective, .. }) = capabilities(None) else { return what() };
    // To give them up for a while and to take them back is always allowed (capset(2)).
    let _ = set(permitted, CapabilitySet::empty());
    let result = what();
    let _ = set(permitted, effective);
    result
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use nix::errno::Errno;
    use nix::sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
    };

    use super::*;

    fn netlink() -> OwnedFd {
        let (flags, protocol) = (SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute);
        socket(AddressFamily::Netlink, SockType::Raw, flags, protocol).unwrap()
    }

    /// What the kernel says to the request to delete an interface that there is not.
    fn answer(socket: &OwnedFd) -> Errno {
        // nlmsghdr: length, RTM_DELLINK, REQUEST and ACK; ifinfomsg: its index (rtnetlink(7)).
        let mut request = [0; 32];
        request[..8].copy_from_slice(&[32, 0, 0, 0, 17, 0, 5, 0]);
        request[20..24].copy_from_slice(&i32::MAX.to_ne_bytes());
        send(socket.as_raw_fd(), &request, MsgFlags::empty()).unwrap();
        let mut answer = [0; 256];
        recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
        Errno::from_raw(-i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]))
    }

    #[test]
    fn nothing_can_be_changed_through_a_socket_that_was_made_without_privileges() {
        let before = capabilities(None).unwrap();
        let socket = without_any(netlink);
        assert_eq!(capabilities(None).unwrap(), before);
        assert_eq!(answer(&socket), Errno::EPERM);
        if before.effective.contains(CapabilitySet::NET_ADMIN) {
            assert_eq!(answer(&netlink()), Errno::ENODEV);
        }
    }
}
