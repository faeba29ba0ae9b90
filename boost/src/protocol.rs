//! Messages between daemon and booster: one JSON object a packet, over a UNIX socket of type
//! SOCK_SEQPACKET on which the daemon listens. The booster connects, and connects again.
//!
//! The daemon first sends [`Order::Hello`] and an [`Order::Vm`] for each VM, with or without boost:
//! those without take part in the accounts of a core. A VM's number is its port's. While something
//! is favoured the booster sends pings, and takes everything back if no answer comes.

use nightporter_api::BoostAccount;
use serde::{Deserialize, Serialize};

/// Both sides must have this one.
pub const VERSION: u32 = 4;
/// Longest packet, in bytes.
pub const PACKET_BYTES_MAX: usize = 4096;

/// The reason why a VM wants its core; see `nightporter_core::tcp::wanting`.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// Bytes that were acknowledged early.
    Bytes,
    /// Its application reads such bytes: the boost ends by itself.
    Reading,
    /// A frame that it has yet to see. It may have half of the budget.
    Turn,
}

/// CPU time that a VM may be favoured for.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Budget {
    /// So much, in microseconds,
    pub cpu_us: u64,
    /// in any window of so many.
    pub window_us: u64,
}

/// The daemon's.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// The first.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The worker's thread.
        worker: i32,
        /// `SCHED_FIFO` priority that the worker is to have; 0: none.
        rt_priority: u8,
    },
    /// A VM, or what has changed about it.
    Vm {
        /// Its number.
        vm: u16,
        /// Its name.
        name: String,
        /// The VMM, as the kernel names the peer of its socket; 0: there is none.
        pid: i32,
        /// Instead: the tap that the VMM holds, in the network namespace of the worker.
        tap: Option<String>,
        /// `None`: never boosted.
        boost: Option<Budget>,
        /// Cgroup in which its vCPU threads are, below the mount point of the `cpu` controller.
        vcpu_cgroup: Option<String>,
    },
    /// The VM is gone.
    Gone {
        /// Its number.
        vm: u16,
    },
    /// It wants its core.
    Boost {
        /// Its number.
        vm: u16,
        /// Its reason.
        claim: Claim,
        /// For so long, from now on, in microseconds.
        for_us: u64,
        /// A count that moves whenever the VM takes some of what it is owed; see there.
        taken: u32,
    },
    /// It wants its core no longer.
    End {
        /// Its number.
        vm: u16,
    },
    /// The answer to a ping.
    Pong {},
}

/// The booster's.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "report", rename_all = "snake_case", deny_unknown_fields)]
pub enum Report {
    /// Are you there?
    Ping {},
    /// Nobody else wants the VM's cores, so its order is void: of it nothing has to be told for
    /// so long. Then an order of what it wants, if it still does.
    Later {
        /// Its number.
        vm: u16,
        /// From now on, in microseconds.
        for_us: u64,
    },
    /// The account of a VM with boost, at most ten times a second.
    Account {
        /// Its number.
        vm: u16,
        /// Its numbers.
        account: BoostAccount,
    },
}
