//! What a plan excuses: connections that may come to no good end although the host does all right.

use nightporter_core::limits::T_ALIVE;

use crate::plan::{Fault, FaultKind, Machine, Plan, StackKind};

/// So many connections for each place in the narrowest queue are a crowd.
const CROWD: usize = 5;

impl Plan {
    /// Something in the plan may end the connection before its time.
    pub(super) fn may_be_reset(&self, conn: usize) -> bool {
        let plan = &self.conns[conn];
        let is = |g: u16| [plan.client, plan.server].contains(&Machine::Guest(g));
        self.faults.iter().any(|f| match f.kind {
            FaultKind::Destroy { guest }
            | FaultKind::Reboot { guest }
            | FaultKind::Migrate { guest } => is(guest),
            FaultKind::Crash { .. } => true,
            _ => false,
        })
    }

    /// A guest of the connection is away for so long that the other end may give up by itself.
    pub(super) fn is_long_away(&self, conn: usize) -> bool {
        let plan = &self.conns[conn];
        let is = |g: u16| [plan.client, plan.server].contains(&Machine::Guest(g));
        let away = |f: &Fault| match f.kind {
            FaultKind::Pause { guest } | FaultKind::DropDelivered { guest, .. } => {
                is(guest) && is_long_absence(f)
            }
            _ => false,
        };
        self.faults.iter().any(away)
    }

    /// The host hears nothing of what a guest of the connection gets, and sends it all again.
    pub(super) fn is_deaf(&self, conn: usize) -> bool {
        let plan = &self.conns[conn];
        let is = |g: u16| [plan.client, plan.server].contains(&Machine::Guest(g));
        let unheard = |f: &Fault| matches!(f.kind, FaultKind::OneWay { guest } if is(guest));
        self.is_long_away(conn) || self.faults.iter().any(unheard)
    }

    /// smoltcp asks for one neighbour at a time: while it looks for one that is gone it may not
    /// find those that are there.
    pub(super) fn may_miss_neighbor(&self, conn: usize) -> bool {
        let gone = |f: &Fault| matches!(f.kind, FaultKind::Destroy { .. }) || is_long_absence(f);
        self.has_smoltcp(conn) && self.faults.iter().any(gone)
    }

    /// So many that repeat their segments in step: the same ones meet a full queue every time,
    /// until they give up.
    pub(super) fn is_crowd(&self) -> bool {
        let links = self.remotes.iter().flat_map(|r| [&r.to_host, &r.from_host]);
        let queues = links.map(|link| link.queue_frames).chain([self.host.uplink_queue_frames]);
        queues.min().is_some_and(|frames| self.conns.len() >= CROWD * frames)
    }

    /// One end is smoltcp, whose SYN-ACK may never come.
    pub(super) fn has_smoltcp(&self, conn: usize) -> bool {
        self.ends_of(conn).any(|kind| kind == StackKind::Smoltcp)
    }

    /// Two smoltcps that send to each other: after a loss each acknowledges with an old sequence
    /// number, and takes no ACK of the other. And one whose peer took window back repeats nothing;
    /// a coarse scale shows as much (RFC 7323 section 2.4).
    pub(super) fn may_deadlock(&self, conn: usize) -> bool {
        let both = self.ends_of(conn).all(|kind| kind == StackKind::Smoltcp);
        let shrinks = self.faults.iter().any(|f| matches!(f.kind, FaultKind::ShrinkWindow { .. }));
        let ends = [self.conns[conn].client, self.conns[conn].server];
        let coarse = ends.iter().any(|m| self.stack_of(*m).window_scale == Some(14));
        both && self.conns[conn].workload.bytes().iter().all(|n| *n > 0)
            || self.has_smoltcp(conn) && (shrinks || coarse)
    }

    fn ends_of(&self, conn: usize) -> impl Iterator<Item = StackKind> {
        let conn = &self.conns[conn];
        [conn.client, conn.server].into_iter().map(|m| self.stack_of(m).kind)
    }

    /// Neither end means harm: what is written must be read.
    pub(super) fn expects_streams_of(&self, conn: usize) -> bool {
        let conn = &self.conns[conn];
        let honest = |m: &Machine| self.stack_of(*m).kind != StackKind::Hostile;
        [conn.client, conn.server].iter().all(honest)
    }

    /// The connection must come to its end: neither end means harm or is destroyed, and the arena
    /// was not taken away under it.
    pub(super) fn expects_end_of(&self, conn: usize) -> bool {
        let plan = &self.conns[conn];
        let is = |g: u16| [plan.client, plan.server].contains(&Machine::Guest(g));
        let excused = |f: &Fault| match f.kind {
            FaultKind::Destroy { guest } => is(guest),
            FaultKind::Crash { arena, .. } => !arena,
            _ => false,
        };
        self.expects_streams_of(conn) && !self.faults.iter().any(excused)
    }
}

fn is_long_absence(f: &Fault) -> bool {
    let absent = matches!(f.kind, FaultKind::Pause { .. } | FaultKind::DropDelivered { .. });
    absent && f.lasts > T_ALIVE
}
