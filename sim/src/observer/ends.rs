//! Conditions at the end of a run: the bytes that applications read, the complaints of strict
//! stacks, the resets that ends got, and that nothing hangs. All of it is known from machines and
//! plan, not from frames.

use std::collections::BTreeSet;

use nightporter_check::history::{History, Side};
use nightporter_core::time::Instant;

use super::excuse::{self, APPLICATION, Excuses, Judged, Moments};
use super::flows::machine_of_side;
use crate::plan::{Fault, FaultKind, Machine, Plan, StackKind, Workload};
use crate::stack::{Complaint, EndReport, MAYBE_NETWORK, Outcome};

/// The verdict of a rule: nothing, or its observation.
type Ensure = Result<(), String>;

/// INV-01. The bytes that a guest's application read are a beginning of those that the other wrote,
/// and at a close all of them.
pub(super) fn bytes_to_guest(plan: &Plan, ends: &[EndReport], lost: &BTreeSet<usize>) -> Ensure {
    applications(plan, ends, lost, |machine| matches!(machine, Machine::Guest(_)))
}

/// The same for the ends that `is_it` selects. Of connections in `lost` a promise was lost with the
/// arena: the octet of a keepalive may take the place of a byte.
fn applications(
    plan: &Plan,
    ends: &[EndReport],
    lost: &BTreeSet<usize>,
    is_it: impl Fn(Machine) -> bool,
) -> Ensure {
    let known = |e: &&EndReport| {
        is_it(e.machine) && plan.expects_streams_of(e.conn) && !lost.contains(&e.conn)
    };
    for reader in ends.iter().filter(known) {
        let who = format!("connection {}, read by {:?}", reader.conn, reader.machine);
        let conn = &plan.conns[reader.conn];
        let [up, down] = conn.workload.bytes();
        let written = if conn.client == reader.machine { down } else { up };
        // smoltcp's keepalive has its octet in the place of a FIN that is not there yet.
        let octet = u64::from(plan.has_smoltcp(reader.conn));
        let lacks = plan.may_lack_what_it_had(reader.conn, reader.machine);
        if let Some(at) = reader.wrong_at.filter(|at| *at < written && !lacks || octet == 0) {
            return Err(format!("{who}: byte {at} is wrong"));
        }
        if reader.read > written + octet {
            return Err(format!("{who}: {} of {written} bytes", reader.read));
        }
        let hole = reader.outcome == Outcome::Closed && reader.read < written;
        if hole {
            return Err(format!("{who}: closed after {} of {written} bytes", reader.read));
        }
    }
    Ok(())
}

/// INV-02. The same for a remote's application.
pub(super) fn bytes_to_net(plan: &Plan, ends: &[EndReport], lost: &BTreeSet<usize>) -> Ensure {
    applications(plan, ends, lost, |machine| matches!(machine, Machine::Remote(_)))
}

/// The effects of a stranger's segments, besides those of a network.
const FORGED: [&str; 5] = [
    "ACK of something not sent",
    "data after FIN",
    "more than the MSS",
    "neither ACK nor RST",
    "no timestamp",
];

/// INV-16. Strict stacks refuse what Linux refuses, and count it.
pub(super) fn one_endpoint(
    plan: &Plan,
    ends: &[EndReport],
    complaints: &[(Machine, Complaint)],
    moments: &Moments,
    excuses: &mut Excuses,
) -> Ensure {
    let judged_before = excuses.critics_judged + excuses.critics_judged_in_part;
    let is_network = |c: &Complaint| c.cause.starts_with(MAYBE_NETWORK);
    let is_window = |c: &Complaint| c.cause.ends_with("beyond the window");
    for e in ends.iter().filter(|e| plan.expects_streams_of(e.conn)) {
        if plan.stack_of(e.machine).kind != StackKind::Strict || e.opened_at.is_none() {
            continue;
        }
        let judged = plan.judges(e.machine, e.conn, excuse::span(ends, e), moments);
        excuses.critics += 1;
        excuses.critics_judged += u64::from(judged == Judged::All);
        excuses.critics_judged_in_part += u64::from(!matches!(judged, Judged::All | Judged::No));
        // smoltcp scales the window of a repeated SYN-ACK, and sends too much.
        let too_much = plan.has_smoltcp(e.conn) || plan.passes_uncut(e.conn, e.machine);
        let urges = plan.urges(e.conn, e.machine);
        let lacks = plan.may_lack_what_it_had(e.conn, e.machine);
        let counts = |c: &Complaint| match judged {
            Judged::All => true,
            Judged::NotNetwork => !is_network(c),
            Judged::NotForged => {
                !is_network(c) && !is_window(c) && !FORGED.contains(&c.cause)
            }
            Judged::NotWindow => !is_network(c) && !is_window(c),
            Judged::No => false,
        } && !(too_much && is_window(c)
            || urges && c.cause == "URG"
            || lacks && c.cause == "wrong bytes");
        let its = |m: Machine, c: &Complaint| m == e.machine && c.conn == e.conn;
        if let Some((machine, c)) = complaints.iter().find(|(m, c)| its(*m, c) && counts(c)) {
            let Complaint { conn, cause, count } = c;
            return Err(format!(
                "{machine:?} complains of connection {conn}: {cause}, {count} times"
            ));
        }
    }
    excuses.seeds += 1;
    excuses.seeds_judged +=
        u64::from(excuses.critics_judged + excuses.critics_judged_in_part > judged_before);
    Ok(())
}

/// INV-21. A promise was broken: R has seen an RST by the end, or had all it wanted.
pub(super) fn fail_stop(plan: &Plan, h: &History, ends: &[EndReport], moments: &Moments) -> Ensure {
    let must_reset = h.must_reset && h.is_judged();
    if must_reset && !(h.end(Side::R).reset_to || h.end(Side::R).reset) {
        return Err("after a restart R saw no RST".to_owned());
    }
    let outcome = |side: Side| {
        let machine = machine_of_side(h, plan, side);
        let is_it = |e: &&EndReport| Some(e.conn) == h.conn && Some(e.machine) == machine;
        ends.iter().find(is_it).map(|e| e.outcome)
    };
    // The frames that were in its ring before may have been all it wanted.
    let content = outcome(Side::G) == Some(Outcome::Closed);
    if must_reset && !(h.end(Side::G).reset_to || h.end(Side::G).reset || content) {
        return Err("after a restart G saw no RST".to_owned());
    }
    if h.must_tell_r && h.is_judged() && !h.end(Side::R).reset_to {
        return Err("R saw no RST when the guest was gone".to_owned());
    }
    // A remote that acknowledges ahead may go on for ever, and believe no RST (seed 88852).
    let ends =
        |conn| plan.expects_end_of(conn, Instant::MAX, moments) && !plan.acknowledges_ahead(conn);
    if !h.conn.is_some_and(|conn| h.broken && ends(conn)) {
        return Ok(());
    }
    let told = |side: Side| outcome(side) != Some(Outcome::Open);
    if !told(Side::R) {
        return Err("R was not told that its bytes are gone".to_owned());
    }
    if !told(Side::G) {
        return Err("G was not told that bytes are missing".to_owned());
    }
    Ok(())
}

/// INV-18. Nothing hangs, and nothing is reset without a cause. Excused ends are added to
/// `excuses`.
pub(super) fn liveness(
    plan: &Plan,
    ended: bool,
    ends: &[EndReport],
    moments: &Moments,
    excuses: &mut Excuses,
) -> Result<(), (usize, String)> {
    for e in ends.iter().filter(|e| plan.expects_streams_of(e.conn)) {
        let span = excuse::span(ends, e);
        let excuse = plan.reset_excuse(e.conn, span, moments);
        // Without keepalives an end does not notice that the other is gone.
        let patient = plan.conns[e.conn].workload.is_patient() && excuse.is_some();
        let may_hang = patient
            || !plan.expects_end_of(e.conn, span[1], moments)
            || plan.may_deadlock(e.conn)
            || plan.acknowledges_ahead(e.conn);
        let counts = u64::from(excuse != Some(APPLICATION));
        excuses.ends += counts;
        excuses.may_reset += counts * u64::from(excuse.is_some());
        if let Some(why) = excuse.filter(|_| counts > 0) {
            *excuses.reset_excuses.entry(why.to_owned()).or_default() += 1;
        }
        excuses.may_hang += counts * u64::from(may_hang);
        let hangs = e.outcome == Outcome::Open && !ended;
        if hangs && !may_hang {
            return Err((e.conn, format!("hangs: {}", progress(e))));
        }
        excuses.hangs += u64::from(hangs);
        if e.outcome != Outcome::Reset {
            continue;
        }
        let [up, down] = plan.conns[e.conn].workload.bytes();
        let expected = if plan.conns[e.conn].client == e.machine { down } else { up };
        // smoltcp may give up on a FIN whose ACK was lost; by then all is through.
        let through = e.read >= expected && e.written >= e.to_write && plan.has_smoltcp(e.conn);
        // The other end's last ACK was lost, and its next connection on these ports came.
        let is_other = |o: &&EndReport| o.conn == e.conn && o.machine != e.machine;
        let other = ends.iter().find(is_other).map(|o| o.outcome);
        let reused = plan.conns[e.conn].reuse.is_some() && other == Some(Outcome::Closed);
        let excuse = excuse
            .or(through.then_some("smoltcp's last FIN"))
            .or(reused.then_some("its ports were used again"));
        let Some(why) = excuse else {
            return Err((e.conn, format!("was reset without a cause: {}", progress(e))));
        };
        *excuses.resets.entry(why.to_owned()).or_default() += counts;
    }
    Ok(())
}

/// The same where nobody has seen all frames.
pub(super) fn unseen_liveness(plan: &Plan, ended: bool, ends: &[EndReport]) -> Ensure {
    let breaks =
        |fault: &Fault| matches!(fault.kind, FaultKind::Crash { .. } | FaultKind::Reboot { .. });
    let breaks = plan.faults.iter().any(breaks);
    for e in ends {
        let conn = &plan.conns[e.conn];
        if e.outcome == Outcome::Open && !ended && !plan.may_deadlock(e.conn) {
            return Err(format!("hangs: {}", progress(e)));
        }
        let [up, down] = conn.workload.bytes();
        let expected = if conn.client == e.machine { down } else { up };
        let through = e.read >= expected && e.written >= e.to_write;
        let is_wanted = matches!(conn.workload, Workload::Reset { .. }) || conn.reuse.is_some();
        let clocks = [conn.client, conn.server].iter().all(|m| plan.stack_of(*m).timestamps);
        if e.outcome == Outcome::Reset && clocks && !(breaks || through || is_wanted) {
            return Err(format!("was reset without a cause: {}", progress(e)));
        }
    }
    Ok(())
}

fn progress(e: &EndReport) -> String {
    let EndReport { conn, machine, written, to_write, read, .. } = e;
    format!("connection {conn} of {machine:?} wrote {written} of {to_write}, read {read}")
}
