//! The outcome of a frame that left by an overlay: of its datagrams to one peer or to all.

use nightporter_core::drops::DropReason;
use nightporter_core::limits::COPY_COST;
use nightporter_core::overlay::Batch;
use nightporter_core::turn::Sent;
use nix::errno::Errno;

use crate::config::overlay::PEERS_MAX;

/// The result of a frame on its way to one peer or to all.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Peers that did not get all of it, by their bits.
    failed: u64,
    error: Option<Sent>,
    /// Bytes of datagrams beyond the first.
    copied: usize,
    first: usize,
    /// Peers whose paths take less, by their bits.
    pub(super) narrow: u64,
    /// Bytes of the shortest datagram that one of them did not take.
    pub(super) refused: u16,
    /// Bytes of the longest datagram.
    pub(super) longest: u16,
}

const _: () = assert!(PEERS_MAX <= 64);

impl Outcome {
    /// Datagrams were sent to the peer at this place, or not.
    pub(super) fn note(&mut self, place: usize, batch: Batch, posted: Result<(), Errno>) {
        let (len, datagram) = (batch.len, usize::from(batch.datagram));
        self.longest = self.longest.max(batch.datagram);
        self.copied += len + len.div_ceil(datagram) * COPY_COST;
        if self.first == 0 {
            self.first = datagram + COPY_COST;
        }
        if let Err(error) = posted {
            let why = not_sent(error, len > datagram);
            self.failed |= 1 << place;
            self.error = Some(why);
            if why == Sent::Dropped(DropReason::TooBig) {
                let shortest = if self.narrow == 0 { batch.datagram } else { self.refused };
                self.refused = shortest.min(batch.datagram);
                self.narrow |= 1 << place;
            }
        }
    }

    /// The result if it went to so many peers.
    pub(super) fn of(&self, peers: usize) -> Sent {
        match (self.error, self.copied - self.first) {
            (Some(error), _) if self.failed.count_ones() as usize == peers => error,
            (_, 0) => Sent::Done,
            (_, copied) => Sent::Copied(u32::try_from(copied).unwrap_or(u32::MAX)),
        }
    }
}

/// The meaning of a call's errors (udp(7), ip(7)).
pub(super) fn not_sent(error: Errno, is_of_several: bool) -> Sent {
    match error {
        Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM => Sent::Full,
        Errno::EMSGSIZE => Sent::Dropped(DropReason::TooBig),
        // One of them is longer than the path takes (net/ipv4/udp.c, udp_send_skb).
        Errno::EINVAL if is_of_several => Sent::Dropped(DropReason::TooBig),
        // No route, no link, a firewall: it may be otherwise with the next.
        _ => Sent::Dropped(DropReason::PortDown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Batch = Batch { len: 100, datagram: 100 };
    const TWO: Batch = Batch { len: 150, datagram: 100 };

    fn outcome<const N: usize>(batch: Batch, posted: [Result<(), Errno>; N]) -> Sent {
        let mut outcome = Outcome::default();
        posted.into_iter().enumerate().for_each(|(place, it)| outcome.note(place, batch, it));
        outcome.of(N)
    }

    #[test]
    fn who_can_be_reached_has_a_frame_for_everybody() {
        let down = Sent::Dropped(DropReason::PortDown);
        assert_eq!(outcome(ONE, [Ok(())]), Sent::Done);
        assert_eq!(outcome(ONE, [Err(Errno::EHOSTUNREACH)]), down);
        let some = outcome(ONE, [Err(Errno::EHOSTUNREACH), Ok(())]);
        assert!(matches!(some, Sent::Copied(_)), "{some:?}");
        assert_eq!(outcome(ONE, [Err(Errno::EAGAIN), Err(Errno::ENETDOWN)]), down);
        assert_eq!(outcome(ONE, [Err(Errno::EAGAIN)]), Sent::Full);
    }

    #[test]
    fn what_a_frame_becomes_counts_beyond_its_first_datagram() {
        let cost = u32::try_from(COPY_COST).unwrap();
        assert_eq!(outcome(TWO, [Ok(())]), Sent::Copied(50 + cost));
        assert_eq!(outcome(ONE, [Ok(()), Ok(()), Ok(())]), Sent::Copied(2 * (100 + cost)));
    }

    #[test]
    fn a_call_that_the_kernel_does_not_take_is_too_big_only_if_it_has_several_datagrams() {
        let too_big = Sent::Dropped(DropReason::TooBig);
        assert_eq!(outcome(TWO, [Err(Errno::EINVAL)]), too_big);
        assert_eq!(outcome(ONE, [Err(Errno::EMSGSIZE)]), too_big);
        assert_eq!(outcome(ONE, [Err(Errno::EINVAL)]), Sent::Dropped(DropReason::PortDown));
    }

    #[test]
    fn every_peer_with_a_narrow_path_is_known() {
        let mut outcome = Outcome::default();
        for (place, posted) in [Err(Errno::EMSGSIZE), Ok(()), Err(Errno::EMSGSIZE)]
            .into_iter()
            .chain([Err(Errno::EAGAIN), Ok(())])
            .enumerate()
        {
            outcome.note(place, ONE, posted);
        }
        outcome.note(4, TWO, Err(Errno::EINVAL));
        assert_eq!((outcome.narrow, outcome.refused, outcome.longest), (0b10101, 100, 100));
    }
}
