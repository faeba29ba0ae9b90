//! Captures of one seed for a judge from elsewhere (tshark, `.ci/tshark`): the same world twice,
//! with the offload and with every flow in PASS.
//!
//! A capture holds the traffic between two honest machines, one a guest and the other a remote.
//! Between two guests every frame passes the host twice, which looks like a repetition. Partial
//! checksums of a driver are finished, as a network card would do, because a judge of captures sees
//! no virtio header. Super-segments stay whole.

use std::path::Path;

use anyhow::Context as _;
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::plan::{FaultKind, Machine, Plan, StackKind};
use crate::report::write_pcap;
use crate::stack::address::machine_of;
use crate::world::{Recorder, World};
use nightporter_check::frame::Frame;
use nightporter_check::tap::{Tap, Tapped};
use nightporter_check::wire::{F_NEEDS_CSUM, GSO_NONE, on_wire};

/// Writes `seed-N-with-remote.pcap`, `-with-guest`, `-without-remote` and `-without-guest`.
///
/// # Errors
/// If they cannot be written.
pub fn write(seed: u64, out: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let mut plan = Plan::from_seed(seed);
    plan.faults.retain(|fault| leaves_twins_alike(fault.kind));
    for offload in [true, false] {
        if !offload {
            plan.guests.iter_mut().for_each(|guest| guest.ack_offload = false);
        }
        let mut captures = Captures { plan: &plan, sides: [Vec::new(), Vec::new()] };
        let _ = World::new(&plan, false, Some(&mut captures)).run();
        let word = if offload { "with" } else { "without" };
        for (side, frames) in ["remote", "guest"].iter().zip(&captures.sides) {
            let path = out.join(format!("seed-{seed}-{word}-{side}.pcap"));
            let frames = frames.iter().map(|(ns, bytes)| (*ns, bytes.as_slice()));
            write_pcap(&path, frames).with_context(|| format!("write {}", path.display()))?;
        }
    }
    Ok(())
}

impl FaultKind {
    /// Something that the host does for the guest is off while it lasts, and on when it is over.
    pub(crate) fn turns_off(self) -> bool {
        matches!(
            self,
            Self::OffloadOff { .. }
                | Self::FloodsOff { .. }
                | Self::Drain { .. }
                | Self::Late { .. }
        )
    }
}

/// It neither turns the offload on or off, nor sends segments in an honest machine's name.
fn leaves_twins_alike(kind: FaultKind) -> bool {
    !kind.turns_off() && !matches!(kind, FaultKind::Forge { .. })
}

struct Captures<'p> {
    plan: &'p Plan,
    /// The remote side, the guests' side.
    sides: [Vec<(u64, Vec<u8>)>; 2],
}

impl Captures<'_> {
    fn is_honest(&self, machine: Machine) -> bool {
        let stack = match machine {
            Machine::Guest(g) => self.plan.guests.get(usize::from(g)).map(|g| &g.stack),
            Machine::Remote(r) => self.plan.remotes.get(usize::from(r)).map(|r| &r.stack),
        };
        stack.is_some_and(|stack| stack.kind != StackKind::Hostile)
    }

    fn is_wanted(&self, bytes: &[u8]) -> bool {
        let machine = |at: usize| machine_of(*bytes.get(at..)?.first_chunk()?);
        match (machine(0), machine(6)) {
            (Some(a @ Machine::Guest(_)), Some(b @ Machine::Remote(_)))
            | (Some(a @ Machine::Remote(_)), Some(b @ Machine::Guest(_))) => {
                self.is_honest(a) && self.is_honest(b)
            }
            _ => false,
        }
    }
}

impl Recorder for Captures<'_> {
    fn frame(&mut self, t: &Tapped<'_>) {
        if !self.is_wanted(t.bytes) {
            return;
        }
        let side = usize::from(!matches!(t.tap, Tap::FromNet | Tap::ToNet));
        self.sides[side].push((t.at.as_nanos(), finished(t.hdr, t.bytes)));
    }
}

/// The frame with a finished checksum; unchanged if its header's description is impossible.
fn finished(hdr: VirtioNetHdr, bytes: &[u8]) -> Vec<u8> {
    let whole = VirtioNetHdr { flags: hdr.flags & F_NEEDS_CSUM, gso_type: GSO_NONE, ..hdr };
    let frame = Frame { hdr: whole, bytes: bytes.to_vec() };
    on_wire(frame).pop().map_or_else(|| bytes.to_vec(), |frame| frame.bytes)
}
