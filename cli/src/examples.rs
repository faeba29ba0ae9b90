//! Examples of each command, for its manual page.

/// An example: the arguments behind `nightporter`, and what they do.
type Example = (&'static str, &'static str);

/// The examples of each command that has no commands of its own.
#[must_use]
pub const fn examples() -> &'static [(&'static str, &'static [Example])] {
    EXAMPLES
}

const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "status",
        &[
            ("status", "The daemon, its ports, and what its VMs gain."),
            ("--json status", "All of it, for programs."),
        ],
    ),
    (
        "flows",
        &[
            ("flows", "All tracked connections."),
            ("flows --vm web1 --sort held", "Those of a VM; those that owe most come first."),
        ],
    ),
    ("top", &[("top", "VMs, live; Enter shows the connections of one.")]),
    ("stations", &[("stations", "Where the VMs of all hosts are.")]),
    (
        "macs",
        &[
            ("macs", "Every MAC that the switch knows."),
            ("macs lan", "Those behind the uplink lan."),
        ],
    ),
    (
        "flow",
        &[
            ("flow 7", "All about connection 7."),
            ("flow 7 --trace", "Its segments, as they pass; end with Ctrl-C."),
        ],
    ),
    (
        "capture",
        &[
            ("capture web1 -w web1.pcap", "The frames of a port, for tcpdump or Wireshark."),
            ("capture web1 --port 443 -w tls.pcap", "Only those of TCP or UDP port 443."),
        ],
    ),
    (
        "analyze",
        &[
            ("analyze web1.pcap", "Delays, losses and times between ACKs of a capture."),
            ("analyze guest.pcap net.pcap", "A capture of each side of a host."),
        ],
    ),
    ("monitor", &[("monitor web1 --for 30s", "Watches a VM for half a minute.")]),
    ("advise", &[("advise", "Which VMs of this host wait for a core.")]),
    (
        "offload",
        &[
            ("offload web1 off", "New connections of the VM have no ack offload."),
            ("offload web1 on", "They have it again; a drain ends."),
        ],
    ),
    ("congestion-offload", &[("congestion-offload web1 on", "The host sends for the VM.")]),
    (
        "rate-limit",
        &[
            ("rate-limit web1 from-guest 100", "The VM sends at most 100 Mbit/s."),
            ("rate-limit web1 from-guest off", "As fast as it can."),
        ],
    ),
    ("vm list", &[("vm list --watch", "All VMs, with rates, every second.")]),
    ("vm show", &[("vm show web1", "All about a VM, and why its link is down.")]),
    (
        "vm add",
        &[
            ("vm add web3 mac=52:54:00:00:00:03 budget=128M", "A VM comes."),
            ("vm add web3 --save", "In a file of its own, so that it is there after a restart."),
            ("vm add web3 --dry-run", "Whether it could."),
        ],
    ),
    ("vm set", &[("vm set web1 mtu=9000 mac=", "Another MTU, and the default for its MAC.")]),
    (
        "vm remove",
        &[
            ("vm remove web1", "A VM goes; drain it first."),
            ("vm remove web3 --save", "With the file that `vm add --save` has written."),
        ],
    ),
    (
        "attach",
        &[
            ("attach vnet0", "The VM with this tap has ack offload from now on."),
            ("attach vnet0 ack_offload=false", "It is attached, and as it was."),
            ("attach web1tap0 --save", "And again after a restart."),
            ("attach --bridge virbr0", "All taps of the bridge, and those that come later."),
        ],
    ),
    (
        "detach",
        &[
            ("detach vnet0", "The tap is plain, once no connection owes anything."),
            ("detach vnet0 --drain 1min", "That may take a minute, instead of ten seconds."),
            ("detach vnet0 --save", "It is not attached again after a restart."),
            ("detach --bridge virbr0", "All taps that came with the bridge become plain."),
        ],
    ),
    ("uplink add", &[("uplink add lan2 kind=tap ifname=np1 bridge=br0", "A tap in a bridge.")]),
    ("uplink remove", &[("uplink remove lan2", "An uplink goes.")]),
    (
        "reload",
        &[
            ("reload", "The configuration file holds from now on."),
            ("reload --dry-run", "What it would change."),
        ],
    ),
    (
        "drain",
        &[
            ("drain web1", "Waits until nothing is owed to or by the VM."),
            ("drain web1 --no-wait", "Begins, and does not wait."),
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the commands below `command` that have no commands of their own.
    fn leaves(command: &clap::Command, prefix: &str) -> Vec<String> {
        let of = |it: &clap::Command| {
            let name = format!("{prefix}{}", it.get_name());
            if it.has_subcommands() { leaves(it, &format!("{name} ")) } else { vec![name] }
        };
        command.get_subcommands().flat_map(of).collect()
    }

    #[test]
    fn every_command_has_examples_which_are_right() {
        let named: Vec<_> = EXAMPLES.iter().map(|(name, _)| (*name).to_owned()).collect();
        let mut sorted = (named, leaves(&crate::command(), ""));
        sorted.0.sort_unstable();
        sorted.1.sort_unstable();
        assert_eq!(sorted.0, sorted.1);
        for (name, examples) in EXAMPLES {
            assert!(!examples.is_empty(), "{name}");
            for (arguments, _) in *examples {
                assert!(arguments.contains(name), "{arguments} is of {name}");
                let words = ["nightporter"].into_iter().chain(arguments.split(' '));
                let parsed = crate::command().try_get_matches_from(words);
                assert!(parsed.is_ok(), "{arguments}: {}", parsed.unwrap_err());
            }
        }
    }
}
