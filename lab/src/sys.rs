//! The system calls that need `unsafe`, each behind a safe function.

use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::signal::Signal;

/// Gives a thread (by its id) the SCHED_RR class with this priority.
pub(crate) fn set_round_robin(tid: i32, priority: i32) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: `param` is a valid sched_param that outlives the call.
    let result = unsafe { libc::sched_setscheduler(tid, libc::SCHED_RR, &raw const param) };
    Errno::result(result)?;
    Ok(())
}

/// Segments this TCP socket has retransmitted since it was connected.
pub(crate) fn tcp_retransmits(socket: &impl AsRawFd) -> io::Result<u32> {
    // SAFETY: tcp_info is plain data for which all zeros is a value.
    let mut info: libc::tcp_info = unsafe { mem::zeroed() };
    let mut size = libc::socklen_t::try_from(mem::size_of_val(&info)).expect("a small struct");
    // SAFETY: the kernel writes at most `size` bytes into `info`, which outlives the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut size,
        )
    };
    Errno::result(result)?;
    Ok(info.tcpi_total_retrans)
}

/// Makes the child get SIGKILL when the thread that spawns it ends, and puts it into a process
/// group of its own, so that a terminal's ^C reaches the lab only.
pub(crate) fn die_with_parent(command: &mut Command) {
    command.process_group(0);
    let parent = nix::unistd::getpid();
    let hook = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have gone before the line above took effect.
        if nix::unistd::getppid() != parent {
            return Err(Errno::ESRCH.into());
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls only: no allocation, no locks, async-signal-safe.
    unsafe { command.pre_exec(hook) };
}
