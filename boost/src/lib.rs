//! `nightporter-boost`: a VM that is owed bytes gets its core, within its own share (BST-01 to 06).
//!
//! # Theory of operation
//!
//! The daemon knows which VM is owed bytes, and until when. It sends orders ([`protocol`]); it has
//! no right to touch another process's scheduling, and reads no other process's `/proc`. This
//! program has that right (`CAP_SYS_NICE`) and, where VMs have taps that are attached, the one to
//! see who holds a tap (`CAP_SYS_PTRACE`). It is two processes:
//!
//! - the **booster** ([`booster`]) takes the orders, finds the threads ([`process`]), chooses the
//!   means by the layout of cgroups or refuses ([`layout`]), keeps the accounts ([`policy`]), and
//!   favours threads ([`favour`]);
//! - the **watcher** ([`watcher`]) does nothing but watch the booster.
//!
//! Before a thread is favoured, a record of it is in the journal ([`journal`]), a file on tmpfs.
//! Each process sends the other a beat every 10 ms. If the booster dies or stands, the watcher
//! kills it and takes back what is in the journal. If the watcher dies or stands, the booster takes
//! back everything and ends. If the daemon dies, its socket closes; if it stands, it does not
//! answer the booster's pings. Changes that both processes left are taken back by `ExecStopPost=`
//! and by the next start (`--take-back`).
//!
//! Favoured is: a real-time class (`SCHED_RR` 1), or a cgroup's highest weight with a nice value
//! that is a little lower. Paying back is: nice 19 or a tenth of the cgroup's weight. A thread is
//! favoured only if it was of the normal class with nice 0, so that taking back needs no more than
//! its identity.

pub mod arguments;
pub mod booster;
mod favour;
mod journal;
mod lag;
mod layout;
pub mod policy;
pub mod process;
pub mod protocol;
mod sys;
mod vm;
pub mod watcher;

use std::time::Duration;

/// Each process shows the other that it runs.
pub const BEAT: Duration = Duration::from_millis(10);
/// A process, or a daemon, that has shown nothing for so long stands.
pub const SILENCE_MAX: Duration = Duration::from_millis(50);
/// The two processes count each other's beats that they miss, and no time: where the whole host
/// pauses, as in a VM, neither runs, and neither is to be ended for that.
pub const BEATS_MISSED_MAX: u32 = 5;
/// Real-time priority of both processes: above worker (2) and boost (1), see BST-06.
pub const PRIORITY: u8 = 3;
/// Least priority of a worker that shares cores with boosted vCPUs.
pub const WORKER_PRIORITY: u8 = 2;
/// Real-time priority of a boosted thread.
pub const BOOST_PRIORITY: u8 = 1;

pub use journal::take_back;
