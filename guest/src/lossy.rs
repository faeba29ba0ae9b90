//! Drops a share of the frames a NIC receives, before the guest's TCP sees them.
//!
//! A generic (SKB-mode) XDP program: it runs after virtio-net has handed the frame to the kernel,
//! so the back-end has seen it delivered. Nothing but the running kernel is needed: the program is
//! assembled here. Read as C:
//!
//! ```c
//! u32 key = 0;                                    // counts[0]: frames seen
//! u64 *count = map_lookup(counts, &key); if (count) (*count)++;
//! if (get_prandom_u32() >= threshold) return XDP_PASS;
//! key = 1;                                        // counts[1]: frames dropped
//! count = map_lookup(counts, &key); if (count) (*count)++;
//! return XDP_DROP;
//! ```

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use anyhow::{Context, Result, ensure};

use crate::bpf::{Insn, insn, link_create, map_create, map_lookup, prog_load};

// include/uapi/linux/bpf.h, Linux 6.1.
const HELPER_MAP_LOOKUP_ELEM: i32 = 1;
const HELPER_PRANDOM_U32: i32 = 7;
const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;

/// A dropper on one interface. It lives as long as its link, so dropping this detaches it.
pub(crate) struct Dropper {
    counts: OwnedFd,
    _program: OwnedFd,
    _link: OwnedFd,
}

impl Dropper {
    /// Attaches to `interface`; `percent` of its frames vanish.
    pub(crate) fn attach(interface: &str, percent: u32) -> Result<Self> {
        ensure!(percent <= 100, "{percent} percent");
        let counts = map_create(2).context("creating the BPF map")?;
        let program = prog_load(&program(counts.as_raw_fd(), percent)).context("loading XDP")?;
        let link = link_create(&program, interface).context("attaching XDP")?;
        Ok(Self { counts, _program: program, _link: link })
    }

    /// Frames seen, frames dropped.
    pub(crate) fn counts(&self) -> Result<(u64, u64)> {
        Ok((map_lookup(&self.counts, 0)?, map_lookup(&self.counts, 1)?))
    }
}

fn program(map: RawFd, percent: u32) -> Vec<Insn> {
    // XDP sees a uniform u32; below the threshold the frame is dropped. 100 % drops 2^32-1 of 2^32.
    let threshold = u64::from(percent) * u64::from(u32::MAX) / 100;
    let threshold = u32::try_from(threshold).expect("percent is at most 100").cast_signed();
    let mut out = count(map, 0);
    out.push(insn(0x85, 0, 0, 0, HELPER_PRANDOM_U32)); // call
    out.push(insn(0xa6, 0, 0, 2, threshold)); // if w0 < threshold skip 2
    out.push(insn(0xb7, 0, 0, 0, XDP_PASS)); // r0 = XDP_PASS
    out.push(insn(0x95, 0, 0, 0, 0)); // exit
    out.extend(count(map, 1));
    out.push(insn(0xb7, 0, 0, 0, XDP_DROP));
    out.push(insn(0x95, 0, 0, 0, 0));
    out
}

/// `counts[key] += 1`.
fn count(map: RawFd, key: i32) -> Vec<Insn> {
    vec![
        insn(0x62, 10, 0, -4, key), // *(u32 *)(fp - 4) = key
        insn(0xbf, 2, 10, 0, 0),    // r2 = fp
        insn(0x07, 2, 0, 0, -4),    // r2 += -4
        insn(0x18, 1, 1, 0, map),   // r1 = map (BPF_PSEUDO_MAP_FD), two slots
        insn(0, 0, 0, 0, 0),
        insn(0x85, 0, 0, 0, HELPER_MAP_LOOKUP_ELEM), // call
        insn(0x15, 0, 0, 2, 0),                      // if r0 == 0 skip 2
        insn(0xb7, 1, 0, 0, 1),                      // r1 = 1
        insn(0xdb, 0, 1, 0, 0),                      // lock *(u64 *)r0 += r1
    ]
}
