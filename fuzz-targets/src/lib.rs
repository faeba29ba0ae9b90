//! The fuzz targets: one function of bytes each. It panics if a condition does not hold that must
//! hold whatever the bytes are.
//!
//! `fuzz/` runs these functions under cargo-fuzz, for as long as one likes; `tests/bounded.rs` runs
//! them on a stable compiler, a bounded number of times. Where bytes alone would rarely get past
//! the first check, a target reads them as operations or fields (`arbitrary`), so that a mutation
//! of the bytes is a mutation of the operations.

pub mod arena;
pub mod bootline;
pub mod captures;
pub mod claims;
pub mod config;
pub mod control;
pub mod etcd;
pub mod flow;
pub mod helpers;
pub mod icmp;
pub mod images;
pub mod messages;
pub mod overlay;
pub mod packets;
pub mod probes;
pub mod requests;
pub mod rings;
pub mod sealed;
pub mod sender;
pub mod sockets;
pub mod streams;
pub mod translate;
pub mod trust;
pub mod wire;

/// A target: its name for `cargo fuzz`, its function, and its first inputs.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of the binary in `fuzz/`, and of its corpus directory.
    pub name: &'static str,
    /// Judges one input; panics on a finding.
    pub run: fn(&[u8]),
    /// Inputs that are right, or nearly, from which mutations start.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "wire", run: wire::run, seeds: wire::seeds },
    Target { name: "icmp", run: icmp::run, seeds: icmp::seeds },
    Target { name: "translate", run: translate::run, seeds: translate::seeds },
    Target { name: "claims", run: claims::run, seeds: claims::seeds },
    Target { name: "packets", run: packets::run, seeds: packets::seeds },
    Target { name: "requests", run: requests::run, seeds: requests::seeds },
    Target { name: "overlay", run: overlay::run, seeds: overlay::seeds },
    Target { name: "probes", run: probes::run, seeds: probes::seeds },
    Target { name: "sender", run: sender::run, seeds: sender::seeds },
    Target { name: "sockets", run: sockets::run, seeds: sockets::seeds },
    Target { name: "streams", run: streams::run, seeds: streams::seeds },
    Target { name: "sealed", run: sealed::run, seeds: sealed::seeds },
    Target { name: "trust", run: trust::run, seeds: trust::seeds },
    Target { name: "helpers", run: helpers::run, seeds: helpers::seeds },
    Target { name: "etcd", run: etcd::run, seeds: etcd::seeds },
    Target { name: "arena", run: arena::run, seeds: arena::seeds },
    Target { name: "images", run: images::run, seeds: images::seeds },
    Target { name: "config", run: config::run, seeds: config::seeds },
    Target { name: "flow", run: flow::run, seeds: flow::seeds },
    Target { name: "rings", run: rings::run, seeds: rings::seeds },
    Target { name: "messages", run: messages::run, seeds: messages::seeds },
    Target { name: "control", run: control::run, seeds: control::seeds },
    Target { name: "bootline", run: bootline::run, seeds: bootline::seeds },
];

/// Bytes without a pattern: a seed for targets that read operations.
fn noise(seed: u32, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9) | 1;
    let byte = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x.to_le_bytes()[1]
    };
    std::iter::repeat_with(byte).take(len).collect()
}
