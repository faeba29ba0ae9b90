//! Probes of the paths to peers: they leave beside frames, and those of peers are answered.

use std::ops::Range;

use nightporter_core::overlay::ecn::Ecn;
use nightporter_core::overlay::{Overlay, PeerId, To};
use nightporter_core::time::Instant;

use super::{OverlayPort, post};

impl OverlayPort {
    /// The width of the path to `peer` is found out beside frames that leave for it.
    pub(super) fn probe(&mut self, now: Instant, peer: PeerId) {
        if !self.overlay.is_probe_due(now, peer) {
            return;
        }
        let before = self.overlay.mtu(now, To::Peer(peer));
        let probe = self.overlay.poll_probe(now, peer);
        self.say_width(now, peer, before);
        if let Some(probe) = probe {
            self.post_alone(peer, &probe);
        }
    }

    /// If this is a probe, or the answer to one: what answers it.
    pub(super) fn hear_probe(&mut self, now: Instant, at: Range<usize>) -> Option<Option<Vec<u8>>> {
        if !Overlay::is_probe(&self.inbox.bytes[at.clone()]) {
            return None;
        }
        let before = self.overlay.mtu(now, To::Peer(self.from));
        let answer = self.overlay.handle_probe(now, self.from, &self.inbox.bytes[at])?;
        self.say_width(now, self.from, before);
        Some(answer)
    }

    /// A probe has shown that the path to `peer` takes less than it took before, or more.
    fn say_width(&self, now: Instant, peer: PeerId, before: u16) {
        let (mtu, to) =
            (self.overlay.mtu(now, To::Peer(peer)), self.peers.get(usize::from(peer.0)));
        let (Some(to), name, configured) = (to, &self.config.name, self.config.mtu) else { return };
        if mtu < before {
            let what = "the path to the peer silently drops long packets";
            tracing::warn!(port = %name, peer = %to, mtu, configured, "{what}");
        } else if mtu > before {
            let what = "the path to the peer takes longer packets";
            tracing::info!(port = %name, peer = %to, mtu, configured, "{what}");
        }
    }

    /// Sends a datagram that is lost if there is no room for it.
    pub(super) fn post_alone(&self, peer: PeerId, datagram: &[u8]) {
        let Some(to) = self.peers.get(usize::from(peer.0)) else { return };
        let len = u16::try_from(datagram.len()).expect("no longer than a packet");
        let _ = post(&self.senders[0], to, datagram, len, Ecn::NotEct);
    }
}
