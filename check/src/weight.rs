//! The amount that a run carried: without it, a run without findings proves nothing. A product that
//! does nothing breaks no promise, so promises are counted too.

use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::history::{History, Side};
use crate::out::Out;

/// Classes of [`Weight::seeds_by_early`]: seeds without an early byte, then by powers of two.
const CLASSES: usize = 48;

/// See the module doc. Sums of one run, or of many.
#[derive(Clone, Debug, Default, Eq, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Weight {
    /// Bytes that were acknowledged to R before the guest itself had acknowledged them.
    pub early_bytes: u64,
    /// Times a flow came to be with offload.
    pub flows_on: u64,
    /// Data segments that the host sent a guest again.
    pub recoveries: u64,
    /// Payload bytes that the host sent for guests, and of them those that it sent again.
    #[serde(default)]
    pub relayed_bytes: u64,
    /// See `relayed_bytes`.
    #[serde(default)]
    pub relayed_again: u64,
    /// Segments of R marked CE, of flows with offload.
    pub ce_marks: u64,
    /// Super-segments of R, of flows with offload.
    pub super_from_net: u64,
    /// Super-segments to a guest that the host made.
    pub super_to_guest: u64,
    /// Segments of R with an unfinished checksum, of flows with offload.
    pub partial_from_net: u64,
    /// Payload bytes of R that had come before.
    #[serde(default)]
    pub needless_from_net: u64,
    /// SYNs that the host has answered for guests, and of these the ones that guests accepted.
    #[serde(default)]
    pub answered: u64,
    /// See `answered`.
    #[serde(default)]
    pub accepted: u64,
    /// Seeds by early bytes: none, and of `n` those from 2^(n-1) on, below 2^n.
    pub seeds_by_early: Vec<u64>,
}

/// Its name, its amount, and its counter.
type Floor = (&'static str, f64, fn(&Weight) -> u64);

/// The least that every seed has to carry on average: about half of the present amount.
const FLOORS: [Floor; 8] = [
    ("early-acknowledged bytes", 1_500_000.0, |w| w.early_bytes),
    ("bytes sent for guests", 250_000.0, |w| w.relayed_bytes),
    ("bytes sent for them again", 8_000.0, |w| w.relayed_again),
    ("flows with offload", 3.0, |w| w.flows_on),
    ("local recoveries", 5.0, |w| w.recoveries),
    ("CE marks", 0.5, |w| w.ce_marks),
    ("super-segments from the uplink", 80.0, |w| w.super_from_net),
    ("super-segments to guests", 80.0, |w| w.super_to_guest),
];

/// Bytes that the median seed acknowledges early at least, and how many of 100 may do without.
const MEDIAN_MIN: u64 = 1 << 20;
const NONE_PERCENT_MAX: u64 = 5;

/// Of fewer seeds nothing is expected: chance decides.
pub const SEEDS_MIN: u64 = 100;

impl Weight {
    /// A frame of `from` came in, of a flow with offload.
    pub(crate) fn on_in(&mut self, h: &History, from: Side, hdr: &VirtioNetHdr, ce: bool) {
        if from == Side::R && h.is_on() {
            self.ce_marks += u64::from(ce);
            self.super_from_net += u64::from(hdr.is_gso());
            self.partial_from_net += u64::from(hdr.needs_csum());
        }
    }

    /// A frame goes out.
    pub(crate) fn on_out(&mut self, h: &History, o: &Out<'_>, hdr: &VirtioNetHdr) {
        match o.to {
            Side::R if h.is_on() && o.gated && h.known.hostile == [false; 2] => {
                if h.is_relayed {
                    let again = h.end(Side::R).end_to.saturating_sub(o.seq);
                    self.relayed_bytes += u64::from(o.tcp.payload_len);
                    self.relayed_again += again.min(o.tcp.payload_len.into());
                }
                let known = h.end(Side::R).ack_to.max(h.end(Side::G).acked);
                let ack = o.ack.map_or(0, |ack| ack.min(h.end(Side::R).end));
                self.early_bytes += ack.saturating_sub(known);
            }
            Side::G => {
                self.recoveries += u64::from(o.is_repeat(h));
                self.super_to_guest += u64::from(o.gated && hdr.is_gso());
            }
            Side::R => {}
        }
    }

    /// The run is over.
    pub(crate) fn on_end(&mut self) {
        let class = u64::BITS - self.early_bytes.leading_zeros();
        self.seeds_by_early = vec![0; CLASSES];
        self.seeds_by_early[(class as usize).min(CLASSES - 1)] = 1;
    }

    /// The sum of two.
    pub fn merge(&mut self, other: &Self) {
        let sums = [
            (&mut self.early_bytes, other.early_bytes),
            (&mut self.flows_on, other.flows_on),
            (&mut self.recoveries, other.recoveries),
            (&mut self.relayed_bytes, other.relayed_bytes),
            (&mut self.relayed_again, other.relayed_again),
            (&mut self.ce_marks, other.ce_marks),
            (&mut self.super_from_net, other.super_from_net),
            (&mut self.super_to_guest, other.super_to_guest),
            (&mut self.partial_from_net, other.partial_from_net),
            (&mut self.needless_from_net, other.needless_from_net),
            (&mut self.answered, other.answered),
            (&mut self.accepted, other.accepted),
        ];
        for (sum, more) in sums {
            *sum += more;
        }
        self.seeds_by_early.resize(CLASSES, 0);
        for (sum, more) in self.seeds_by_early.iter_mut().zip(&other.seeds_by_early) {
            *sum += more;
        }
    }

    /// Seeds without an early-acknowledged byte, and at least how many the median seed has.
    #[must_use]
    pub fn none_and_median(&self) -> (u64, u64) {
        let all: u64 = self.seeds_by_early.iter().sum();
        let mut below = 0;
        let median = self.seeds_by_early.iter().position(|seeds| {
            below += seeds;
            2 * below >= all
        });
        let least = |class: usize| if class == 0 { 0 } else { 1 << (class - 1) };
        (self.seeds_by_early.first().copied().unwrap_or(0), median.map_or(0, least))
    }

    /// The floors that `seeds` seeds missed.
    #[must_use]
    pub fn too_little(&self, seeds: u64) -> Vec<String> {
        if seeds < SEEDS_MIN {
            return Vec::new();
        }
        let missing = FLOORS.iter().filter_map(|(what, each, of)| {
            let (least, have) = (each * seeds as f64, of(self));
            ((have as f64) < least)
                .then(|| format!("too few {what}: {have} of {least:.0} in {seeds} seeds"))
        });
        let mut missing: Vec<String> = missing.collect();
        let (none, median) = self.none_and_median();
        if median < MEDIAN_MIN || 100 * none > NONE_PERCENT_MAX * seeds {
            missing.push(format!(
                "too few early-acknowledged bytes: the median seed has {median}, {none} have none"
            ));
        }
        missing
    }
}

impl std::fmt::Display for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (none, median) = self.none_and_median();
        write!(
            f,
            "{:.1} MB acknowledged early, the median seed at least {median} bytes, {none} seeds \
             none; {:.1} MB sent for guests, {:.2} again; {} flows with offload, {} local \
             recoveries, {} CE marks, super-segments: {} from the uplink, {} to guests; {} \
             unfinished checksums from the uplink; {} SYNs answered, {} accepted",
            self.early_bytes as f64 / 1e6,
            self.relayed_bytes as f64 / 1e6,
            self.relayed_again as f64 / 1e6,
            self.flows_on,
            self.recoveries,
            self.ce_marks,
            self.super_from_net,
            self.super_to_guest,
            self.partial_from_net,
            self.answered,
            self.accepted,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seed(early_bytes: u64) -> Weight {
        let mut one = Weight { early_bytes, ..Weight::default() };
        one.on_end();
        one
    }

    #[test]
    fn the_median_and_the_seeds_without_a_byte_follow_from_classes() {
        let mut all = Weight::default();
        for early in [0, 1000, 1 << 20, (2 << 20) - 1, 5 << 20] {
            all.merge(&seed(early));
        }
        assert_eq!(all.none_and_median(), (1, 1 << 20));
    }

    #[test]
    fn seeds_that_carry_nothing_are_too_little_and_a_few_of_them_are_not_judged() {
        let nothing = Weight::default();
        assert!(nothing.too_little(SEEDS_MIN - 1).is_empty());
        let missing = nothing.too_little(SEEDS_MIN);
        assert!(missing.iter().any(|m| m.contains("early-acknowledged bytes")), "{missing:?}");
    }
}
