//! The control channel: JSON lines over a serial port.

use serde::{Deserialize, Serialize};

/// The host's commands to the guest. The guest answers each with one [`Reply`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case")]
pub enum Command {
    /// Measure how many load loops this vCPU does per millisecond without competition. Answer:
    /// [`Reply::Calibrated`].
    Calibrate,
    /// Start (or replace) the CPU load: `percent` of every period's worth of loops is owed,
    /// whether or not the vCPU was given the time to do it.
    LoadStart {
        /// From [`Reply::Calibrated`].
        loops_per_ms: u64,
        /// Demand in percent of one uncontended vCPU.
        percent: u64,
    },
    /// Stop the CPU load.
    LoadStop,
    /// How much the load has done and owes. Answer: [`Reply::Load`].
    LoadStatus,
    /// Drop this share of the frames a NIC receives, before the guest's TCP sees them; 0 stops it.
    DropFrames {
        /// Index of the NIC, in the order of the kernel command line.
        nic: usize,
        /// 0 to 100.
        percent: u32,
    },
    /// How many frames the NIC's dropper has seen and dropped. Answer: [`Reply::Dropped`].
    DropStatus {
        /// Index of the NIC.
        nic: usize,
    },
    /// Run a program of the guest to its end. Answer: [`Reply::Ran`].
    Run {
        /// Its file.
        program: String,
        /// Its arguments.
        arguments: Vec<String>,
        /// Additions to its environment.
        environment: Vec<(String, String)>,
    },
    /// Start a program that stays, instead of the one that had this name. Answer: [`Reply::Ok`].
    Start {
        /// Its name.
        name: String,
        /// Its file.
        program: String,
        /// Its arguments.
        arguments: Vec<String>,
        /// Additions to its environment.
        environment: Vec<(String, String)>,
    },
    /// Send a line to one of those. Answer, with its next line: [`Reply::Said`].
    Say {
        /// Its name.
        name: String,
        /// Without its end.
        line: String,
    },
    /// Serve the data port in this network namespace, too, which `ip netns add` has made. Answer:
    /// [`Reply::Ok`].
    Serve {
        /// Its name.
        namespace: String,
    },
    /// The counters of the guest's TCP ([`crate::netstat`]). Answer: [`Reply::Counted`].
    Netstat {
        /// How the counters' names begin.
        names: Vec<String>,
    },
    /// Write into a file that is there, as of `/proc/sys`.
    Write {
        /// Its path.
        path: String,
        /// The text.
        text: String,
    },
    /// Take the virtio-net driver off the NIC's device (sysfs `unbind`).
    DriverUnbind {
        /// Index of the NIC.
        nic: usize,
    },
    /// Give the device back to its driver and configure the NIC again.
    DriverBind {
        /// Index of the NIC.
        nic: usize,
    },
    /// Use the CPU's widest vector registers in two threads that take the CPU from each other, so
    /// often. An error says which register changed, and on which machine.
    Vectors {
        /// How often.
        rounds: u32,
    },
    /// Reboot at once, without closing anything. The next line is `Ready` of the new boot.
    Reboot,
    /// Panic the kernel. The guest reboots (`panic=` on its command line) or stays dead.
    Crash,
    /// Power off at once, without closing anything.
    PowerOff,
}

/// The guest's answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Sent unasked, once per boot, when the NICs are up and the data port listens.
    Ready {
        /// Interface names in the order of the kernel command line.
        nics: Vec<String>,
    },
    /// Done.
    Ok,
    /// Load loops per millisecond of an uncontended vCPU.
    Calibrated {
        /// Loops per millisecond.
        loops_per_ms: u64,
    },
    /// State of the CPU load.
    Load {
        /// Milliseconds of uncontended vCPU time the work done so far is worth.
        done_ms: u64,
        /// Milliseconds of uncontended vCPU time the load is behind its demand.
        backlog_ms: u64,
        /// Milliseconds since the load started, by the guest's clock.
        elapsed_ms: u64,
    },
    /// Counters of a NIC's dropper.
    Dropped {
        /// Frames that reached the dropper.
        seen: u64,
        /// Frames it dropped.
        dropped: u64,
    },
    /// A program has ended.
    Ran {
        /// With exit code 0.
        ok: bool,
        /// Its output.
        output: String,
    },
    /// A line of a program.
    Said {
        /// With its end.
        line: String,
    },
    /// Counters of TCP, each a sum.
    Counted {
        /// In the order of the names.
        values: Vec<u64>,
    },
    /// The command failed; the guest goes on.
    Error {
        /// The error.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_one_json_line_and_reads_back() {
        let command = Command::LoadStart { loops_per_ms: 70_000, percent: 60 };
        let line = serde_json::to_string(&command).expect("serialises");
        assert_eq!(line, r#"{"cmd":"load_start","loops_per_ms":70000,"percent":60}"#);
        assert_eq!(serde_json::from_str::<Command>(&line).expect("parses"), command);
    }
}
