//! A guest that forwards: the plan's TCP runs on a machine behind it, by itself, and the guest is a
//! router between two links. To the host both have the guest's addresses, as behind a NAT.

use std::collections::VecDeque;

use etherparse::checksum::Sum16BitWords;
use nightporter_core::time::{Duration, Instant};

use super::{World, WorldEvent};
use crate::link::Link;
use crate::plan::ForwardPlan;
use nightporter_check::frame::Frame;
use nightporter_check::wire::{IpVersion, Packet, on_wire, pseudo_header, written};

const ETHERNET: usize = 14;
const ICMP_V4: u8 = 1;
const ICMP_V6: u8 = 58;
/// Bytes of the packet that an error quotes: its IP header, and ports and number of TCP.
const QUOTED: [usize; 2] = [20 + 8, 40 + 8];

/// The machine behind a guest, and the way to it.
pub(super) struct Behind {
    plan: ForwardPlan,
    to_end: Link,
    from_end: Link,
    /// Forwarded, or made by the router, for the guest's ring.
    pub(super) out: VecDeque<Frame>,
}

impl Behind {
    pub(super) fn new(plan: ForwardPlan, seed: u64, guest: u16) -> Self {
        let link = |plan, way: &str| Link::new(plan, seed, &format!("behind {guest} {way}"));
        Self {
            plan,
            to_end: link(plan.to_end, "to"),
            from_end: link(plan.from_end, "from"),
            out: VecDeque::new(),
        }
    }

    fn is_asleep(&self, now: Instant) -> bool {
        self.plan.sleeps.is_some_and(|(from, to)| (from..to).contains(&now.as_millis()))
    }

    /// A segment on its way to the machine; its arrivals are added to `arrivals`.
    fn forward(&mut self, now: Instant, frame: Frame, arrivals: &mut Vec<(Instant, Frame)>) {
        // Of a super-segment one error, and of each other packet one: Linux limits none of these
        // (`icmpv4_mask_allow`).
        let mut is_said = false;
        for mut piece in on_wire(frame) {
            if piece.bytes.len() > ETHERNET + usize::from(self.plan.to_end.mtu) {
                let error = too_big(&piece.bytes, self.plan.to_end.mtu).filter(|_| !is_said);
                is_said = true;
                self.out.extend(error.map(Frame::on_wire));
                continue;
            }
            lower_ttl(&mut piece.bytes);
            self.to_end.send(now, piece, arrivals);
        }
    }
}

impl World<'_> {
    /// The guest has taken this frame from its ring.
    pub(super) fn forward(&mut self, i: usize, frame: Frame) {
        let now = self.now;
        let node = &mut self.nodes[i];
        let Some(behind) = &mut node.behind else { return };
        if !is_tcp(&frame) {
            node.stack.handle_frame(now, frame); // the router answers for its addresses
            return self.run_end(i);
        }
        let mut arrivals = Vec::new();
        behind.forward(now, frame, &mut arrivals);
        for (at, frame) in arrivals {
            self.schedule(at, WorldEvent::Behind(i, frame, true));
        }
    }

    /// A frame has crossed a link behind guest `i`.
    pub(super) fn arrive_behind(&mut self, i: usize, mut frame: Frame, to_end: bool) {
        let now = self.now;
        let node = &mut self.nodes[i];
        let Some(behind) = &mut node.behind else { return };
        if !to_end {
            if !behind.plan.hides_ttl {
                lower_ttl(&mut frame.bytes);
            }
            behind.out.push_back(frame);
            return self.wake_node(i);
        }
        if !behind.is_asleep(now) {
            node.stack.handle_frame(now, frame);
            self.run_end(i);
        }
    }

    /// The machine behind guest `i` runs.
    pub(super) fn run_end(&mut self, i: usize) {
        let now = self.now;
        let node = &mut self.nodes[i];
        let Some(behind) = &mut node.behind else { return };
        if behind.is_asleep(now) {
            let wakes_at = behind.plan.sleeps.map_or(0, |(_, to)| to);
            return self.arm_node(i, Instant::from_millis(wakes_at));
        }
        if node.stack.poll_timeout(now).is_some_and(|at| at <= now) {
            node.stack.handle_timeout(now);
        }
        let (mut arrivals, mut own) = (Vec::new(), false);
        while let Some(frame) = node.stack.poll_transmit(now) {
            if is_tcp(&frame) {
                for piece in on_wire(frame) {
                    behind.from_end.send(now, piece, &mut arrivals);
                }
            } else {
                behind.out.push_back(frame);
                own = true;
            }
        }
        let next = node.stack.poll_timeout(now);
        for (at, frame) in arrivals {
            self.schedule(at, WorldEvent::Behind(i, frame, false));
        }
        if own {
            self.wake_node(i);
        }
        if let Some(at) = next {
            self.arm_node(i, at.max(now + Duration::from_micros(1)));
        }
    }
}

fn is_tcp(frame: &Frame) -> bool {
    Packet::parse(&frame.bytes).is_ok_and(|packet| packet.tcp().is_some())
}

/// A router takes one from the TTL or hop limit.
fn lower_ttl(frame: &mut [u8]) {
    let Ok(packet) = Packet::parse(frame) else { return };
    let Some((ip, _)) = packet.tcp() else { return };
    let (at, version) = (usize::from(ip.header_offset), ip.version);
    let end = usize::from(ip.payload_offset);
    match version {
        IpVersion::V4 => {
            frame[at + 8] = frame[at + 8].saturating_sub(1);
            frame[at + 10..at + 12].fill(0);
            let sum = written(&Sum16BitWords::new().add_slice(&frame[at..end]));
            frame[at + 10..at + 12].copy_from_slice(&sum);
        }
        IpVersion::V6 => frame[at + 7] = frame[at + 7].saturating_sub(1),
    }
}

/// The router's error about a packet that is too long (RFC 792, RFC 4443 section 3.2), as the frame
/// that goes back. The router has the address that the packet was for.
fn too_big(frame: &[u8], mtu: u16) -> Option<Vec<u8>> {
    let packet = Packet::parse(frame).ok()?;
    let (ip, _) = packet.tcp()?;
    let at = usize::from(ip.header_offset);
    let v4 = ip.version == IpVersion::V4;
    let quoted = frame.get(at..at + QUOTED[usize::from(!v4)])?;
    let [high, low] = mtu.to_be_bytes();
    let kind = if v4 { [3, 4] } else { [2, 0] };
    let mut icmp = [&[kind[0], kind[1], 0, 0, 0, 0, high, low][..], quoted].concat();
    let len = u16::try_from(icmp.len()).ok()?;
    let (from, to) = (ip.dst, ip.src);
    let sum = if v4 {
        Sum16BitWords::new()
    } else {
        pseudo_header(IpVersion::V6, from, to, ICMP_V6, len.into())
    };
    let check = written(&sum.add_slice(&icmp));
    icmp[2..4].copy_from_slice(&check);
    let mut header = if v4 {
        let [high, low] = (20 + len).to_be_bytes();
        let mut header = vec![0x45, 0, high, low, 0, 0, 0, 0, 64, ICMP_V4, 0, 0];
        header.extend(&from.0[12..]);
        header.extend(&to.0[12..]);
        let check = written(&Sum16BitWords::new().add_slice(&header));
        header[10..12].copy_from_slice(&check);
        header
    } else {
        let [high, low] = len.to_be_bytes();
        let header = [0x60, 0, 0, 0, high, low, ICMP_V6, 64];
        [&header[..], &from.0, &to.0].concat()
    };
    let mut bytes = [&frame[6..12], &frame[..6], &frame[12..14]].concat();
    bytes.append(&mut header);
    bytes.extend(icmp);
    Some(bytes)
}

#[cfg(test)]
mod tests;
