//! The excuses of a plan: connections that may end badly although the host does everything right.
//!
//! An excuse applies to one connection, from the moment at which its cause happened. The observer
//! notes the moments. A run counts how often an excuse existed and how often it was needed
//! ([`Excuses`]), and too large a share fails a long enough run. Shares may only shrink.

use std::collections::{BTreeMap, BTreeSet};

use nightporter_core::limits::T_ALIVE;
use nightporter_core::time::{Duration, Instant};

use crate::plan::{Accepts, ConnPlan, Fault, FaultKind, Machine, Plan, StackKind, Workload};
use crate::stack::EndReport;
use crate::stack::app::USER_TIMEOUT;

/// The client resets it (`Workload::Reset`).
pub(super) const APPLICATION: &str = "its application";
/// Its host told the remotes with promises.
pub(super) const MIGRATED: &str = "guest migrated";
/// So many connections for each place in the narrowest queue are a crowd.
const CROWD: usize = 5;
/// So many are one in which connections fail.
const CROWD_THAT_FAILS: usize = 50;
/// A SYN is sent so often within [`USER_TIMEOUT`]: after 0, 1, 3, 7, 15, 31, 63 and 123 seconds.
const SYN_TRIES: usize = 8;

/// Events, besides the plan's static faults, that end connections.
#[derive(Debug, Default)]
pub(super) struct Moments {
    /// When, and to which guest; none: to the daemon.
    pub(super) all: Vec<(Instant, Option<u16>, &'static str)>,
    /// Connections with a promise that was lost in a crash, or may have been.
    pub(super) betrayed: BTreeSet<usize>,
    /// A middlebox reset them.
    pub(super) killed: BTreeSet<usize>,
    /// No SYN came as far as the host; or one did, went on to the other side, and found no answer.
    pub(super) unanswered: BTreeSet<usize>,
    /// The host had accepted them, and G did not answer or was never asked (ACC-09).
    pub(super) given_up: BTreeSet<usize>,
    /// The arena was lost.
    pub(super) arena_lost: bool,
}

impl Moments {
    /// Something happened to a guest of the connection, or with `host` to the daemon, while it was
    /// there.
    fn met(
        &self,
        plan: &Plan,
        conn: usize,
        span: [Instant; 2],
        host: bool,
    ) -> Option<&'static str> {
        let is_its = |guest: Option<u16>| match guest {
            Some(g) => plan.ends_at(conn, g),
            None => host,
        };
        let is_it = |(at, guest, _): &&(Instant, Option<u16>, &str)| {
            (span[0]..=span[1]).contains(at) && is_its(*guest)
        };
        self.all.iter().find(is_it).map(|(_, _, why)| *why)
    }
}

/// Ends of connections, and how many of them needed an excuse.
#[derive(Clone, Debug, Default, Eq, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Excuses {
    /// Ends of connections between honest machines, except those that exist to be reset.
    pub ends: u64,
    /// Of those, how many could have been reset without a violation, as things went.
    pub may_reset: u64,
    /// Those, by their excuses.
    #[serde(default)]
    pub reset_excuses: BTreeMap<String, u64>,
    /// How many were, by their excuses.
    pub resets: BTreeMap<String, u64>,
    /// How many could have hung without a violation, and did.
    pub may_hang: u64,
    /// See `may_hang`.
    pub hangs: u64,
    /// Ends with a TCP that complains, and of those the ones whose complaints all count, or all but
    /// those that a network may cause.
    pub critics: u64,
    /// See `critics`.
    pub critics_judged: u64,
    /// See `critics`.
    pub critics_judged_in_part: u64,
    /// Seeds, and those with at least one critic whose complaints count.
    pub seeds: u64,
    /// See `seeds`.
    pub seeds_judged: u64,
}

/// Largest shares, in percent: of ends that may be reset, that were, that may hang; and the
/// smallest of seeds whose complaints are judged. They may only become stricter.
const MAY_RESET_MAX: f64 = 60.0;
const RESET_MAX: f64 = 12.0;
const MAY_HANG_MAX: f64 = 30.0;
const JUDGED_MIN: f64 = 88.0;

impl Excuses {
    /// The sum of two.
    pub fn merge(&mut self, other: &Self) {
        let sums = [
            (&mut self.ends, other.ends),
            (&mut self.may_reset, other.may_reset),
            (&mut self.may_hang, other.may_hang),
            (&mut self.hangs, other.hangs),
            (&mut self.critics, other.critics),
            (&mut self.critics_judged, other.critics_judged),
            (&mut self.critics_judged_in_part, other.critics_judged_in_part),
            (&mut self.seeds, other.seeds),
            (&mut self.seeds_judged, other.seeds_judged),
        ];
        for (sum, more) in sums {
            *sum += more;
        }
        let maps =
            [(&mut self.reset_excuses, &other.reset_excuses), (&mut self.resets, &other.resets)];
        for (sums, other) in maps {
            for (why, more) in other {
                *sums.entry(why.clone()).or_default() += more;
            }
        }
    }

    /// Which shares are larger than they may be.
    #[must_use]
    pub fn too_many(&self) -> Vec<String> {
        let share = |part: u64, of: u64| 100.0 * part as f64 / of.max(1) as f64;
        let resets = self.resets.values().sum();
        let too_large = [
            ("of ends may be reset", share(self.may_reset, self.ends), MAY_RESET_MAX),
            ("of ends were reset and excused", share(resets, self.ends), RESET_MAX),
            ("of ends may hang", share(self.may_hang, self.ends), MAY_HANG_MAX),
        ];
        let judged = share(self.seeds_judged, self.seeds);
        let too_large = too_large.iter().filter(|(_, have, most)| have > most);
        let mut told: Vec<String> = too_large
            .map(|(what, have, most)| format!("too many excuses: {have:.1} % {what}, not {most}"))
            .collect();
        if judged < JUDGED_MIN {
            told.push(format!(
                "too many excuses: complaints are judged in {judged:.1} % of the seeds, not in \
                 {JUDGED_MIN}"
            ));
        }
        told
    }
}

impl std::fmt::Display for Excuses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let share = |part: u64, of: u64| 100.0 * part as f64 / of.max(1) as f64;
        let were = |why: &String| self.resets.get(why).copied().unwrap_or(0);
        let others = self.resets.keys().filter(|why| !self.reset_excuses.contains_key(*why));
        let whys: Vec<String> = self
            .reset_excuses
            .iter()
            .chain(others.map(|why| (why, &0)))
            .map(|(why, n)| format!("{why} {} of {n}", were(why)))
            .collect();
        write!(
            f,
            "of {} ends {:.1} % may be reset, and were: {}; {:.1} % may hang, {} did; complaints \
             of {:.1} % of the ends count, of another {:.1} % but for a network's; seeds with \
             complaints judged: {:.1} %",
            self.ends,
            share(self.may_reset, self.ends),
            if whys.is_empty() { "none".to_owned() } else { whys.join(", ") },
            share(self.may_hang, self.ends),
            self.hangs,
            share(self.critics_judged, self.critics),
            share(self.critics_judged_in_part, self.critics),
            share(self.seeds_judged, self.seeds),
        )
    }
}

/// Which complaints of an end count.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Judged {
    All,
    /// Except those that a network may cause.
    NotNetwork,
    /// And except those that a stranger's segment causes where the flow passes.
    NotForged,
    /// And except those of a window that was taken back, or that the host has shown for the other
    /// end when the guest's frames then go past it.
    NotWindow,
    No,
}

impl Plan {
    /// Guest `g` is one end of the connection.
    fn ends_at(&self, conn: usize, g: u16) -> bool {
        let conn = &self.conns[conn];
        [conn.client, conn.server].contains(&Machine::Guest(g))
    }

    /// Why the connection, which was there from `span[0]` to `span[1]`, may have been reset.
    pub(super) fn reset_excuse(
        &self,
        conn: usize,
        span: [Instant; 2],
        moments: &Moments,
    ) -> Option<&'static str> {
        let sets = [
            (moments.killed.contains(&conn), "a middlebox's reset"),
            (moments.betrayed.contains(&conn), "a promise lost in a crash"),
            (moments.unanswered.contains(&conn), "no answer"),
            (moments.given_up.contains(&conn), "accepted by the host alone"),
        ];
        if let Some((_, why)) = sets.iter().find(|(is_so, _)| *is_so) {
            return Some(why);
        }
        if matches!(self.conns[conn].workload, Workload::Reset { .. }) {
            return Some(APPLICATION);
        }
        if let Some(why) = moments.met(self, conn, span, false) {
            return Some(why);
        }
        // It came too late for its guest.
        let gone = |(at, guest, why): &&(Instant, Option<u16>, &str)| {
            let its = guest.is_some_and(|g| self.ends_at(conn, g));
            its && *why == "guest destroyed" && *at <= span[1]
        };
        if let Some((_, _, why)) = moments.all.iter().find(gone) {
            return Some(why);
        }
        let gives_up = span[1].since(span[0]) >= USER_TIMEOUT;
        let rest = [
            (self.is_away(conn, span), "a guest away for minutes"),
            (self.crowds(CROWD_THAT_FAILS) && gives_up, "a crowd"),
            (self.is_in_step(conn) && gives_up, "a crowd in step"),
            (self.may_miss_neighbor(conn, span), "smoltcp looks for a neighbour"),
            (self.may_deadlock(conn), "smoltcp's deadlock"),
            (gives_up && self.is_stuffed(conn, span), "no room for what passes uncut"),
            (self.acknowledges_ahead(conn), "an end that acknowledges what it does not have"),
        ];
        rest.iter().find(|(is_so, _)| *is_so).map(|(_, why)| *why)
    }

    /// A guest of the connection is away for so long that the other end may give up by itself.
    fn is_away(&self, conn: usize, span: [Instant; 2]) -> bool {
        let away = |f: &Fault| match f.kind {
            FaultKind::Pause { guest } | FaultKind::DropDelivered { guest, .. } => {
                self.ends_at(conn, guest) && is_long_absence(f)
            }
            _ => false,
        };
        self.faults.iter().any(|f| overlaps(f, span) && away(f))
    }

    /// A guest of the connection takes nothing for minutes, and is sent it all again.
    pub(super) fn is_deaf(&self, conn: usize) -> bool {
        self.is_away(conn, [Instant::ZERO, Instant::MAX])
    }

    /// R's packets pass uncut, and G, which shows less room than the host has shown before, drops
    /// what does not fit (SNOOP-13). Once it reads again R repeats that when its timer says so,
    /// which by then waits for longer than R has patience (seeds 38973, 40080).
    fn is_stuffed(&self, conn: usize, span: [Instant; 2]) -> bool {
        self.faults.iter().any(|f| match f.kind {
            FaultKind::StopReading { machine: machine @ Machine::Guest(g) } => {
                let its = self.ends_at(conn, g) && self.passes_uncut(conn, machine);
                its && overlaps(f, span) && 2 * f.lasts.as_nanos() > USER_TIMEOUT.as_nanos()
            }
            _ => false,
        })
    }

    /// An end of it says to have what it may never get: where the host does not send for the guest,
    /// the guest believes it.
    pub(super) fn acknowledges_ahead(&self, conn: usize) -> bool {
        let conn = &self.conns[conn];
        [conn.client, conn.server].iter().any(|m| self.stack_of(*m).quirks.acks_ahead)
    }

    /// smoltcp asks for one neighbour at a time: while it looks for one that is gone it may not
    /// find those that are there.
    fn may_miss_neighbor(&self, conn: usize, span: [Instant; 2]) -> bool {
        let ends = |c: &ConnPlan| [c.client, c.server];
        let is_smoltcp = |m: &Machine| self.stack_of(*m).kind == StackKind::Smoltcp;
        let seekers: Vec<Machine> =
            ends(&self.conns[conn]).into_iter().filter(is_smoltcp).collect();
        let is_sought = |guest: u16| {
            let its = self.conns.iter().filter(|c| ends(c).contains(&Machine::Guest(guest)));
            its.flat_map(ends).any(|m| seekers.contains(&m))
        };
        let gone = |f: &Fault| match f.kind {
            FaultKind::Destroy { guest } => is_sought(guest),
            FaultKind::Pause { guest } | FaultKind::DropDelivered { guest, .. } => {
                is_long_absence(f) && is_sought(guest)
            }
            _ => false,
        };
        self.faults.iter().filter(|f| f.at <= span[1]).any(gone)
    }

    /// So many connections repeat their segments in step that the same ones meet a full queue every
    /// time, until they give up.
    pub(super) fn is_crowd(&self) -> bool {
        self.crowds(CROWD)
    }

    fn crowds(&self, each: usize) -> bool {
        let lasts =
            |c: &&ConnPlan| !matches!(c.workload, Workload::Reset { .. } | Workload::Idle { .. });
        let conns = self.conns.iter().filter(lasts).count();
        conns >= each * self.narrowest_queue()
    }

    /// Frames that wait at most at the narrowest place of all paths.
    fn narrowest_queue(&self) -> usize {
        let links = self.remotes.iter().flat_map(|r| [&r.to_host, &r.from_host]);
        let queues = links.map(|link| link.queue_frames);
        queues.fold(self.host.uplink_queue_frames, usize::min)
    }

    /// It was opened while a guest of it was paused, as others were. The end of the pause sends all
    /// their SYNs, or the answers to them, at one instant, and so do their timers from then on.
    /// Each time a queueful gets through, so of more than [`SYN_TRIES`] of these some fail (seed
    /// 16066).
    fn is_in_step(&self, conn: usize) -> bool {
        let opens_in = |f: &Fault, c: &ConnPlan| (f.at..=f.at + f.lasts).contains(&c.opens_at);
        self.faults.iter().any(|f| {
            let FaultKind::Pause { guest } = f.kind else { return false };
            let is_held = |id: &usize| self.ends_at(*id, guest) && opens_in(f, &self.conns[*id]);
            let held = (0..self.conns.len()).filter(is_held).count();
            is_held(&conn) && held > SYN_TRIES * self.narrowest_queue()
        })
    }

    /// The reader takes window back, and so may lack a byte that smoltcp takes for sent: there it
    /// finds the octet of smoltcp's keepalive (seed 58009).
    pub(super) fn may_lack_what_it_had(&self, conn: usize, reader: Machine) -> bool {
        let shrinks = self.faults.iter().any(|f| match f.kind {
            FaultKind::ShrinkWindow { machine } => machine == reader,
            _ => false,
        });
        shrinks && self.stack_of(self.other_end(conn, reader)).kind == StackKind::Smoltcp
    }

    /// One end is smoltcp, whose SYN-ACK may never come.
    pub(super) fn has_smoltcp(&self, conn: usize) -> bool {
        self.ends_of(conn).any(|kind| kind == StackKind::Smoltcp)
    }

    /// smoltcp that sends and receives at once: after a loss it acknowledges with an old sequence
    /// number, and may take no ACK or repeat nothing. And one whose peer took window back repeats
    /// nothing; a coarse scale shows as much (RFC 7323 section 2.4).
    pub(super) fn may_deadlock(&self, conn: usize) -> bool {
        let ends = [self.conns[conn].client, self.conns[conn].server];
        let shrinks = self.faults.iter().any(|f| match f.kind {
            FaultKind::ShrinkWindow { machine } => ends.contains(&machine),
            _ => false,
        });
        let coarse = ends.iter().any(|m| self.stack_of(*m).window_scale == Some(14));
        let meet =
            matches!(self.conns[conn].workload, Workload::Bulk { up, down } if up > 0 && down > 0);
        self.has_smoltcp(conn) && (meet || shrinks || coarse)
    }

    fn ends_of(&self, conn: usize) -> impl Iterator<Item = StackKind> {
        let conn = &self.conns[conn];
        [conn.client, conn.server].into_iter().map(|m| self.stack_of(m).kind)
    }

    /// Neither end is hostile: written bytes must be read.
    pub(super) fn expects_streams_of(&self, conn: usize) -> bool {
        let conn = &self.conns[conn];
        let honest = |m: &Machine| self.stack_of(*m).kind != StackKind::Hostile;
        [conn.client, conn.server].iter().all(honest)
    }

    /// The connection must come to its end: neither end means harm or is destroyed before `until`,
    /// and the arena was not taken away under it.
    pub(super) fn expects_end_of(&self, conn: usize, until: Instant, moments: &Moments) -> bool {
        let destroyed = |f: &Fault| match f.kind {
            FaultKind::Destroy { guest } => self.ends_at(conn, guest) && f.at <= until,
            _ => false,
        };
        // Nobody repeats the RST of a guest that has moved: its host knows it no more.
        let untold = |(at, guest, why): &(Instant, Option<u16>, &str)| {
            let its = guest.is_some_and(|g| self.ends_at(conn, g));
            its && *why == MIGRATED && *at <= until && self.may_lose_to_remote(conn, *at)
        };
        let lost = moments.arena_lost && moments.betrayed.contains(&conn);
        let gone = self.faults.iter().any(destroyed) || moments.all.iter().any(untold);
        self.expects_streams_of(conn) && !lost && !gone
    }

    /// The path from the host to the connection's remote loses frames at `at`.
    fn may_lose_to_remote(&self, conn: usize, at: Instant) -> bool {
        let ends = [self.conns[conn].client, self.conns[conn].server];
        let loses = |f: &Fault| match f.kind {
            FaultKind::Loss { remote, to_host: false, .. }
            | FaultKind::BurstLoss { remote, to_host: false, .. }
            | FaultKind::Corrupt { remote, to_host: false, .. }
            | FaultKind::Cut { remote, to_host: false } => ends.contains(&Machine::Remote(remote)),
            _ => false,
        };
        self.faults.iter().any(|f| loses(f) && overlaps(f, [at, at]))
    }

    /// The host may send for the guest at some time.
    fn may_flood(&self, guest: u16) -> bool {
        let turned_on =
            |f: &Fault| matches!(f.kind, FaultKind::FloodsOff { guest: g } if g == guest);
        self.guests[usize::from(guest)].congestion_offload || self.faults.iter().any(turned_on)
    }

    /// R's packets have headers that the host does not understand: its data passes uncut to G, in
    /// the window that R was shown before (SNOOP-13). G's own may be smaller.
    pub(super) fn passes_uncut(&self, conn: usize, to: Machine) -> bool {
        let quirks = self.stack_of(self.other_end(conn, to)).quirks;
        if self.conns[conn].v6 { quirks.extension_header } else { quirks.ip_options }
    }

    /// The other end of `to` sends urgent data now and then.
    pub(super) fn urges(&self, conn: usize, to: Machine) -> bool {
        self.stack_of(self.other_end(conn, to)).quirks.urgent
    }

    fn other_end(&self, conn: usize, of: Machine) -> Machine {
        let conn = &self.conns[conn];
        if conn.client == of { conn.server } else { conn.client }
    }

    /// A machine that is paused at `until`, when it would forget a connection, does so when it is
    /// back, and has met by then what waits in its ring (seed 41187).
    fn lingers_until(&self, machine: Machine, until: Instant) -> Instant {
        let covers = |f: &&Fault| match f.kind {
            FaultKind::Pause { guest } => {
                machine == Machine::Guest(guest) && (f.at..=f.at + f.lasts).contains(&until)
            }
            _ => false,
        };
        self.faults.iter().filter(covers).map(|f| f.at + f.lasts).max().unwrap_or(until)
    }

    /// Frames for the machine are broken at some time. Of another connection's frame, from before
    /// or after, the port may be what is broken (seed 71 with accept offload).
    fn corrupts_for(&self, machine: Machine) -> bool {
        self.faults.iter().any(|f| match f.kind {
            FaultKind::Corrupt { remote, to_host, .. } => {
                to_host == matches!(machine, Machine::Guest(_))
                    || machine == Machine::Remote(remote)
            }
            _ => false,
        })
    }

    /// Which complaints of `machine` about the connection count: it was there for `span`.
    pub(super) fn judges(
        &self,
        machine: Machine,
        conn: usize,
        span: [Instant; 2],
        moments: &Moments,
    ) -> Judged {
        let ends = [self.conns[conn].client, self.conns[conn].server];
        let of = |kind: FaultKind| kind.machines().into_iter().flatten();
        let its = |kind: FaultKind| of(kind).any(|m| ends.contains(&m));
        let lingers = [span[0], self.lingers_until(machine, span[1] + LINGER)];
        let met = |f: &&Fault| overlaps(f, lingers);
        let any = |is_it: fn(FaultKind) -> bool| {
            self.faults.iter().filter(met).any(|f| its(f.kind) && is_it(f.kind))
        };
        let forged = |f: &Fault| match f.kind {
            FaultKind::Forge { guest, .. } => machine == Machine::Guest(guest),
            _ => false,
        };
        // The flow leaves at once, and R knows an edge beyond the guest's own (SNOOP-42): the guest
        // drops the excess (seed 18357, a guest with a buffer of 2,000 bytes). A guest for which
        // the host sends knows an edge beyond R's (FLOOD-14), so R drops the excess of what the
        // guest sends past the host (seeds 700013 and 700033). Segments past a host that has
        // accepted for their guest have other numbers than R knows (`--accept`, seed 1010).
        let answers_past = |f: &Fault| match f.kind {
            FaultKind::OneWay { guest, .. } => {
                let its = ends.contains(&Machine::Guest(guest));
                let translates = self.guests[usize::from(guest)].accepts != Accepts::No;
                its && (machine == Machine::Guest(guest) || self.may_flood(guest) || translates)
            }
            _ => false,
        };
        let lies = self.acknowledges_ahead(conn);
        if lies
            || !self.expects_streams_of(conn)
            || moments.met(self, conn, lingers, true).is_some()
        {
            Judged::No
        } else if self.faults.iter().filter(met).any(forged) {
            Judged::NotForged
        } else if any(|kind| matches!(kind, FaultKind::ShrinkWindow { .. }))
            || self.faults.iter().filter(met).any(answers_past)
        {
            Judged::NotWindow
        } else if self.corrupts_for(machine)
            || any(|kind| {
                matches!(
                    kind,
                    FaultKind::Reorder { .. }
                    | FaultKind::Forge { .. }
                    | FaultKind::OneWay { .. } // its frames overtake each other
                    // So do copies that come two ticks later, of what the guest itself dropped
                    // (seed 6583): an old clock on something new (`PAWS_TICKS`).
                    | FaultKind::Duplicate { delay_us: 1_001.., .. }
                )
            })
        {
            Judged::NotNetwork
        } else {
            Judged::All
        }
    }
}

/// An end that is over still answers for a while (`TCP_TIMEWAIT_LEN`).
const LINGER: Duration = Duration::from_secs(60);

/// When a connection was there: since its first end opened, until `end` was over.
pub(super) fn span(ends: &[EndReport], end: &EndReport) -> [Instant; 2] {
    let of = ends.iter().filter(|e| e.conn == end.conn).filter_map(|e| e.opened_at);
    [of.min().unwrap_or(Instant::ZERO), end.over_at.unwrap_or(Instant::MAX)]
}

/// The fault was there while a connection was.
fn overlaps(f: &Fault, span: [Instant; 2]) -> bool {
    f.at <= span[1] && span[0] <= f.at + f.lasts
}

fn is_long_absence(f: &Fault) -> bool {
    let absent = matches!(f.kind, FaultKind::Pause { .. } | FaultKind::DropDelivered { .. });
    absent && f.lasts > T_ALIVE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_guest_whose_frames_go_past_the_host_windows_count_that_the_host_did_not_show() {
        let ends = [Machine::Guest(0), Machine::Remote(0)];
        let others = [Machine::Guest(1), Machine::Remote(1)];
        let opens_at = Instant::ZERO;
        let judged = |congestion_offload, faults: &[FaultKind]| {
            let mut plan = Plan::from_seed(0);
            plan.guests[0].congestion_offload = congestion_offload;
            let workload = Workload::Bulk { up: 1, down: 1 };
            let conn = |[client, server]: [Machine; 2]| ConnPlan {
                client,
                server,
                v6: false,
                opens_at,
                workload,
                reuse: None,
            };
            plan.conns = vec![conn(ends), conn(others)];
            let fault =
                |kind: &FaultKind| Fault { at: opens_at, lasts: Duration::ZERO, kind: *kind };
            plan.faults = faults.iter().map(fault).collect();
            let of = |conn, end| plan.judges(end, conn, [opens_at, opens_at], &Moments::default());
            assert_eq!(others.map(|end| of(1, end)), [Judged::All; 2], "another guest's");
            ends.map(|end| of(0, end))
        };
        let past = FaultKind::OneWay { guest: 0, fragments: false };
        assert_eq!(judged(true, &[]), [Judged::All; 2]);
        assert_eq!(judged(false, &[past]), [Judged::NotWindow, Judged::NotNetwork]);
        assert_eq!(judged(true, &[past]), [Judged::NotWindow; 2]);
        let off = FaultKind::FloodsOff { guest: 0 };
        assert_eq!(judged(false, &[past, off]), [Judged::NotWindow; 2]);
    }

    #[test]
    fn a_share_above_its_bound_is_told_and_one_below_is_not() {
        let calm = Excuses { ends: 100, seeds: 10, seeds_judged: 9, ..Excuses::default() };
        assert_eq!(calm.too_many(), Vec::<String>::new());
        let resets = BTreeMap::from([("a crowd".to_owned(), 99)]);
        let told = Excuses { resets, seeds_judged: 1, ..calm }.too_many();
        assert!(told[0].contains("were reset") && told[1].contains("judged in 10.0 %"), "{told:?}");
    }
}
