//! The system calls of a running daemon. Others are refused as if the kernel did not have them, and
//! counted: that a guest has found a way to one of them must not end the network of all. Four that
//! only somebody makes who has taken the daemon over do end it.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use nix::libc;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter_all_threads,
};

use crate::start::{StartError, error};
use crate::sys;
use crate::vhost::listener::Access;

/// With any arguments.
const CALLS: &[libc::c_long] = &[
    // Events, time, chance.
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_timerfd_settime,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_getrandom,
    // Descriptors and files.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_openat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_unlink,
    libc::SYS_mkdir,
    libc::SYS_flock, // whose file is closed
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_memfd_create,
    // Sockets that there are; those of VMs that come.
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    // Memory; see `rules`.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Threads and their signals.
    libc::SYS_clone3, // see `old_clone`
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_futex,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_getrusage,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Taps, interfaces and bridges (linux/if_tun.h, linux/sockios.h); `FIONBIO` is std's.
const IOCTLS: [u32; 9] = [
    0x5421,      // FIONBIO
    0x8913,      // SIOCGIFFLAGS
    0x8914,      // SIOCSIFFLAGS
    0x8933,      // SIOCGIFINDEX
    0x89a2,      // SIOCBRADDIF
    0x4004_54ca, // TUNSETIFF
    0x4004_54d0, // TUNSETOFFLOAD
    0x4004_54d8, // TUNSETVNETHDRSZ
    0x4004_54dc, // TUNSETVNETLE
];

/// Levels and names (udp(7), ip(7), ipv6(7)).
const OPTIONS: [(libc::c_int, libc::c_int); 5] = [
    (libc::SOL_UDP, libc::UDP_GRO),
    (libc::IPPROTO_IP, libc::IP_RECVTOS),
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
];

/// Nobody but an intruder makes them.
const DEADLY: [libc::c_long; 4] =
    [libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace, libc::SYS_process_vm_writev];

/// Calls that were refused.
static REFUSED: AtomicU64 = AtomicU64::new(0);
/// The number of the last one.
static LAST: AtomicI64 = AtomicI64::new(0);

/// Calls that were refused so far.
pub(crate) fn refused() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// Another call was refused: in the handler of a signal.
pub(crate) fn note(call: i64) {
    LAST.store(call, Ordering::Relaxed);
    REFUSED.fetch_add(1, Ordering::Relaxed);
}

/// Now and then: tells of calls that were refused since `known`.
pub(crate) fn report(known: &mut u64) {
    let all = refused();
    if std::mem::replace(known, all) != all {
        let call = LAST.load(Ordering::Relaxed);
        tracing::error!(call, refused = all, "a system call that the daemon has no use for");
    }
}

/// From now on all threads make no other calls.
pub(super) fn restrict(access: Access) -> Result<(), StartError> {
    let refuse = |e: &dyn std::fmt::Display| {
        let fix = "run a kernel with CONFIG_SECCOMP_FILTER";
        error(format!("cannot shut system calls away (seccomp): {e}"), fix)
    };
    sys::handle_refused_calls().map_err(|e| refuse(&e))?;
    // The last forbids to restrict more.
    let mut filters = [deadly(), old_clone(), allowed(access)].into_iter();
    filters
        .try_for_each(|f| f.map_err(Error::from).and_then(|f| apply_filter_all_threads(&f)))
        .map_err(|e| refuse(&e))
}

type Built = Result<BpfProgram, seccompiler::BackendError>;

fn allowed(access: Access) -> Built {
    let mut rules: Vec<_> = CALLS.iter().map(|&call| (call, Vec::new())).collect();
    rules.extend(with_arguments(access)?);
    build(rules, SeccompAction::Trap, SeccompAction::Allow)
}

fn deadly() -> Built {
    let rules = DEADLY.map(|call| (call, Vec::new())).into();
    build(rules, SeccompAction::Allow, SeccompAction::KillProcess)
}

/// The flags of clone3 are in memory, which no filter sees: libraries take it for an old kernel's
/// and go on to clone. They do so with all signals blocked, so this is no matter for the handler.
fn old_clone() -> Built {
    let refuse = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    build(vec![(libc::SYS_clone3, Vec::new())], SeccompAction::Allow, refuse)
}

fn build(
    rules: Vec<(libc::c_long, Vec<SeccompRule>)>,
    other: SeccompAction,
    these: SeccompAction,
) -> Built {
    let rules = rules.into_iter().collect();
    SeccompFilter::new(rules, other, these, TargetArch::x86_64)?.try_into()
}

/// Calls of which only some are needed.
fn with_arguments(
    access: Access,
) -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>, seccompiler::BackendError> {
    let compare = |at, operator, value: u32| {
        SeccompCondition::new(at, SeccompCmpArgLen::Dword, operator, value.into())
    };
    let is = |at, value| SeccompRule::new(vec![compare(at, Eq, value)?]);
    let number = |constant: libc::c_int| constant.cast_unsigned();
    let exec = MaskedEq(number(libc::PROT_EXEC).into());
    let no_code = || SeccompRule::new(vec![compare(2, exec.clone(), 0)?]);
    let thread = number(libc::CLONE_THREAD);
    let new = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWPID;
    let new = new | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC | libc::CLONE_NEWCGROUP;
    let is_thread = compare(0, MaskedEq((thread | number(new)).into()), thread)?;
    let ioctls = IOCTLS.iter().map(|&request| is(1, request));
    // For VMs that come, and to ask and set up interfaces; for overlays that come: datagrams. No
    // other sockets of a network, no netlink.
    let datagrams = |family| {
        let kind = compare(1, MaskedEq(0xf), number(libc::SOCK_DGRAM))?;
        SeccompRule::new(vec![compare(0, Eq, number(family))?, kind])
    };
    let sockets =
        vec![is(0, number(libc::AF_UNIX))?, datagrams(libc::AF_INET)?, datagrams(libc::AF_INET6)?];
    // Other options than those of overlays are those of packet filters.
    let option = |(level, name)| {
        SeccompRule::new(vec![compare(1, Eq, number(level))?, compare(2, Eq, number(name))?])
    };
    let mut options = vec![is(1, number(libc::SOL_SOCKET))?];
    for it in OPTIONS {
        options.push(option(it)?);
    }
    let mut rules = vec![
        (libc::SYS_mmap, vec![no_code()?]),
        (libc::SYS_mprotect, vec![no_code()?]),
        (libc::SYS_clone, vec![SeccompRule::new(vec![is_thread])?]),
        (libc::SYS_ioctl, ioctls.collect::<Result<_, _>>()?),
        (libc::SYS_socket, sockets),
        (libc::SYS_setsockopt, options),
        (libc::SYS_prctl, vec![is(0, number(libc::PR_SET_NAME))?]),
    ];
    // Files are not asked about by Landlock here, so those of others are taken away at worst.
    if let Some(mode) = access.mode {
        rules.push((libc::SYS_chmod, vec![is(1, mode)?]));
    }
    if access.uid.is_some() || access.gid.is_some() {
        let ids = [(1, access.uid), (2, access.gid)].into_iter();
        let ids = ids.map(|(at, id)| compare(at, Eq, id.unwrap_or(u32::MAX))); // chown(2): -1
        rules.push((libc::SYS_chown, vec![SeccompRule::new(ids.collect::<Result<_, _>>()?)?]));
    }
    Ok(rules)
}
