//! The rules, one file each, and their order for a frame on its way out.

pub(crate) mod ack_numbers;
pub(crate) mod ack_order;
pub(crate) mod budget;
pub(crate) mod bytes_to_guest;
pub(crate) mod bytes_to_net;
pub(crate) mod checksums;
pub(crate) mod congestion_marks;
pub(crate) mod dead_guest;
pub(crate) mod delivery_fits;
pub(crate) mod duplicates;
pub(crate) mod early_acceptance;
pub(crate) mod early_fin;
pub(crate) mod echoes;
pub(crate) mod economy;
pub(crate) mod endings;
pub(crate) mod fail_stop;
pub(crate) mod field_by_field;
pub(crate) mod flooding;
pub(crate) mod foreign_options;
pub(crate) mod held;
pub(crate) mod immutable;
pub(crate) mod isolation;
pub(crate) mod late_ack;
pub(crate) mod liveness;
pub(crate) mod news;
pub(crate) mod odd_acks;
pub(crate) mod one_endpoint;
pub(crate) mod parked;
pub(crate) mod prompt_ack;
pub(crate) mod pure_pass;
pub(crate) mod quality;
pub(crate) mod recovery;
pub(crate) mod right_edge;
pub(crate) mod senders;
pub(crate) mod sequence_numbers;
#[cfg(test)]
mod tests;
pub(crate) mod tsval_order;
pub(crate) mod tsval_owner;
pub(crate) mod turns;
pub(crate) mod unsent_ack;
pub(crate) mod windows;
pub(crate) mod wire_conformance;

use crate::history::{History, Side};
use crate::out::Out;
use crate::rule::Rule;

/// The verdict of a rule: nothing, or its observation.
pub(crate) type Ensure = Result<(), String>;
/// The same, and which rule it was.
pub(crate) type Verdict = Result<(), (Rule, String)>;

/// Bytes of a page of the store.
pub(crate) const PAGE_BYTES: u64 = 16 * 1024;

/// The memory of rules that are not about time and quality, of a flow; each rule's is its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) ack_order: ack_order::AckOrder,
    pub(crate) congestion_marks: congestion_marks::Marks,
    pub(crate) fail_stop: fail_stop::FailStop,
    pub(crate) held: held::Held,
    pub(crate) liveness: liveness::Liveness,
    pub(crate) right_edge: right_edge::Edges,
}

/// Asks every rule that looks at frames on their way out.
pub(crate) fn check_out(h: &History, o: &Out<'_>, gone: bool) -> Verdict {
    dead_guest::on_out(h, o, gone).map_err(|what| (Rule::DeadGuest, what))?;
    // Not even such a guest speaks for R (SNOOP-24).
    let for_liar =
        h.known.hostile == [false, true] && !h.opaque && !h.known.fragments && o.to == Side::R;
    if for_liar && !h.past {
        return ack_numbers::on_out(h, o).map_err(|what| (Rule::AckNumbers, what));
    }
    // The host need not speak for a hostile guest, and may send anything to a hostile remote.
    if h.opaque || h.known.hostile[Side::G as usize] || h.known.hostile[o.to as usize] {
        return Ok(());
    }
    let for_all: [(Rule, Ensure); 8] = [
        (Rule::AckNumbers, ack_numbers::on_out(h, o)),
        (Rule::EarlyFin, early_fin::on_out(h, o)),
        (Rule::EarlyAcceptance, early_acceptance::on_out(h, o)),
        (Rule::UnsentAck, unsent_ack::on_out(h, o)),
        (Rule::AckOrder, ack_order::on_out(h, o)),
        (Rule::SequenceNumbers, sequence_numbers::on_out(h, o)),
        (Rule::DeliveryFits, delivery_fits::on_out(h, o)),
        (Rule::Immutable, immutable::on_out(h, o)),
    ];
    first_wrong(&for_all)?;
    if h.known.hostile[Side::R as usize] {
        field_by_field::foreign_to_guest(h, o).map_err(|what| (Rule::Fields, what))?;
        return duplicates::on_out(h, o).map_err(|what| (Rule::Duplicates, what));
    }
    let between_honest: [(Rule, Ensure); 11] = [
        (Rule::CongestionMarks, congestion_marks::on_out(h, o)),
        (Rule::TsvalOrder, tsval_order::on_out(h, o)),
        (Rule::PurePass, pure_pass::on_out(h, o)),
        (Rule::ForeignOptions, foreign_options::on_out(h, o)),
        (Rule::RightEdge, right_edge::on_out(h, o)),
        (Rule::BytesToGuest, bytes_to_guest::on_out(h, o)),
        (Rule::BytesToNet, bytes_to_net::on_out(h, o)),
        (Rule::TsvalOwner, tsval_owner::on_out(h, o)),
        (Rule::WireConformance, wire_conformance::on_out(h, o)),
        (Rule::OneEndpoint, one_endpoint::on_out(h, o)),
        (Rule::FailStop, fail_stop::on_out(h, o)),
    ];
    first_wrong(&between_honest)?;
    quality::on_out(h, o)?;
    liveness::on_out(h, o).map_err(|what| (Rule::Liveness, what))
}

pub(crate) fn first_wrong(checks: &[(Rule, Ensure)]) -> Verdict {
    let wrong = checks.iter().find_map(|(n, check)| check.clone().err().map(|what| (*n, what)));
    wrong.map_or(Ok(()), Err)
}
