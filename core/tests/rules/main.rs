//! The test ideas of the specification's rules, at the level of packets: COM, SNOOP, LIFE, SEC.
//! Each test is named after its rule; what the scenarios show already is not shown again.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "tests take numbers apart"
)]

#[path = "../common/mod.rs"]
mod common;

mod absence;
mod accept;
mod awaited;
mod boost;
mod budget;
mod clocks;
mod com;
mod doubt;
mod flood;
mod forward;
mod guest_frames;
mod guest_recovery;
mod handshake;
mod late_ack;
mod lead;
mod liberal;
mod life;
mod live_flow;
mod migration;
mod resume;
mod sec;
mod sender;
mod snoop_accept;
mod snoop_ahead;
mod snoop_control;
mod snoop_guest;
mod snoop_window;
mod uncontrolled;
mod unheard;
mod unseen;
mod vm_to_vm;
mod wire;

use common::World;
use common::world::Peer;
use nightporter_core::engine::Verdict;
use nightporter_core::port::PortId;
use nightporter_core::store::arena::Arena;
use nightporter_core::tcp::flow::Flow;
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use zerocopy::IntoBytes;

/// R sends so many segments of 1000 bytes from `from` on, each in its own batch.
fn sends_segments(r: &Peer<'_>, from: i64, count: i64) {
    for n in 0..count {
        let at = from + 1000 * n;
        r.sends(&format!("{at}:{}", at + 1000));
    }
}

/// One exchange after the handshake, so that G is known to be established and H's window is its
/// own: R's stream stands at 1001 then.
fn warms_up(r: &Peer<'_>, g: &Peer<'_>) {
    r.sends("1:1001");
    g.sends("ack 1001");
    r.takes_all();
    g.takes_all();
}

/// A raw frame from the uplink.
fn from_uplink(w: &World<'_>, frame: &[u8]) -> Verdict {
    let uplink = w.0.borrow().outside.uplink;
    w.frame(uplink, VirtioNetHdr::default(), frame)
}

/// Something about the first connection's flow.
fn flow<T>(w: &World<'_>, f: impl FnOnce(&Flow) -> T) -> T {
    w.flow(0, f).expect("a flow")
}

/// Records in this memory say too little for their flows to go on.
fn tear(memory: &mut [u64]) {
    let mut arena = Arena::open(memory.as_mut_bytes()).expect("an arena");
    let ids: Vec<_> = arena.records().map(|(id, _)| id).collect();
    ids.into_iter().for_each(|id| arena.commit_marks(id, 0));
}

/// The guest port of every world here.
const GUEST: PortId = PortId(1);
