//! Probes of the paths to peers: they leave beside frames, and those of peers are answered.

use std::ops::Range;

use nightporter_core::overlay::ecn::Ecn;
use nightporter_core::overlay::{Overlay, PeerId, To};
use nightporter_core::time::Instant;
use nightporter_core::turn::Sent;

use super::{OverlayPort, post};
use crate::port::outcome::not_sent;

impl OverlayPort {
    /// The width of the path to `peer` is found out beside frames that leave for it.
    pub(super) fn probe(&mut self, now: Instant, peer: PeerId) {
        if !self.overlay.is_probe_due(now, peer) {
            return;
        }
        let before = self.overlay.mtu(now, To::Peer(peer));
        let probe = self.overlay.poll_probe(now, peer);
        self.say_width(now, peer, before);
        if probe.is_some_and(|probe| !self.post_alone(peer, &probe)) {
            self.overlay.handle_unsent_probe(peer);
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

    /// Sends a datagram. `false`: the kernel has no room for it, and it has not left.
    pub(super) fn post_alone(&self, peer: PeerId, datagram: &[u8]) -> bool {
        let Some(to) = self.peers.get(usize::from(peer.0)) else { return true };
        let len = u16::try_from(datagram.len()).expect("no longer than a packet");
        let posted = post(&self.senders[0], to, datagram, len, Ecn::NotEct);
        posted.err().is_none_or(|error| not_sent(error, false) != Sent::Full)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::process::Command;

    use nightporter_core::time::Duration;
    use nix::sched::{CloneFlags, unshare};
    use rustix::net::sockopt;

    use super::*;
    use crate::config::OverlayConfig;
    use crate::port::shared::Sockets;

    /// A peer whose MAC nobody tells: datagrams for it stay in the sender's buffer.
    fn port_to_nowhere() -> OverlayPort {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        for args in [
            "link add np0 type veth peer name np1",
            "address add 192.0.2.1/24 dev np0",
            "link set np0 up",
            "link set np1 up",
        ] {
            assert!(Command::new("ip").args(args.split(' ')).status().unwrap().success());
        }
        let host = |last| SocketAddr::from(([192, 0, 2, last], 4789));
        let config = OverlayConfig {
            name: "over".into(),
            network: None,
            vni: 7,
            local: host(1),
            peers: vec![host(2)],
            mtu: 1450,
        };
        OverlayPort::open(&config, [1, 2, 3, 4], &Sockets::default()).unwrap()
    }

    #[test]
    #[ignore = "needs root (a network namespace)"]
    fn a_probe_for_which_the_socket_has_no_room_is_not_lost() {
        let judged = std::thread::spawn(|| {
            let mut port = port_to_nowhere();
            let (peer, start) = (PeerId(0), Instant::from_secs(1000));
            sockopt::set_socket_send_buffer_size(&port.senders[0], 0).unwrap(); // the smallest
            let sent = std::iter::repeat_with(|| port.post_alone(peer, &[7; 1000]));
            assert!(sent.take(100).take_while(|left| *left).count() < 100, "its buffer is full");
            for second in 0..20 {
                let now = start + Duration::from_secs(second);
                assert!(port.overlay.is_probe_due(now, peer), "it was lost after {second} s");
                port.probe(now, peer);
            }
        });
        judged.join().unwrap();
    }
}
