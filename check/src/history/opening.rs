//! The beginning of a connection, and of later ones on the same ports.

use super::*;
use crate::stream::streams_of;

impl History {
    /// A SYN, or an answer to one, of this connection came; `None`: of no existing connection.
    pub fn note_next(&mut self, conn: Option<(usize, bool)>) {
        self.next = conn.or(self.next);
    }

    /// The number of `side` lies before this connection: it is of one that had its ports before.
    pub(crate) fn is_of_earlier(&self, side: Side, seq: u64) -> bool {
        self.next.is_some() && self.end(side).isn.is_some() && seq < BASE
    }

    /// The host does not know that G has opened anew past it, and speaks to R of the connection
    /// before (seed 80044).
    pub(crate) fn is_about_earlier(&self, o: &Out<'_>) -> bool {
        self.past && o.ack.is_some_and(|ack| self.is_of_earlier(o.to, ack))
    }

    /// Frames that the host made for the earlier connection, and frames that have waited for G's
    /// ring since then (seed 91723).
    pub(crate) fn is_late(&self, o: &Out<'_>) -> bool {
        o.gated && o.waited && o.ack.is_some_and(|ack| self.is_of_earlier(o.to, ack))
    }

    /// An RST for a G that has opened anew on these ports: while it waits for R's SYN-ACK it
    /// believes one that acknowledges its SYN (RFC 9293 section 3.10.7.3), and no other.
    pub(crate) fn is_refused(&self, o: &Out<'_>) -> bool {
        let opens = self.end(Side::R).isn.is_none() && self.end(Side::G).isn.is_some();
        o.to == Side::G && self.next.is_some() && opens && o.ack != Some(BASE + 1)
    }

    /// An end answered, or none could.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.is_open() || self.ends.iter().all(|e| e.frames_to == 0)
    }

    pub(super) fn on_syn(&mut self, at: Instant, from: Side, tcp: &Tcp) {
        let o = &tcp.options;
        // A SYN offers with ECE and CWR, a SYN-ACK accepts with ECE alone (RFC 3168, 6.1.1).
        let both = TcpFlags::ECE | TcpFlags::CWR;
        let accepts = tcp.flags.ece() && !tcp.flags.intersects(TcpFlags::CWR | TcpFlags::AE);
        let offer = Offer {
            mss: o.mss,
            scale: o.window_scale,
            timestamps: o.timestamps.is_some(),
            sack: o.sack_permitted,
            odd: o.unknown || o.malformed,
            marks: if tcp.flags.ack() { accepts } else { tcp.flags.contains(both) },
            mptcp: o.mptcp,
        };
        let tsval = o.timestamps.map(|t| t.tsval);
        let isn = tcp.seq.0;
        // R's answer to a SYN of G before this one (seed 87911); one to data on it is no such.
        let own = self.end(Side::G).isn.map_or(0, |isn| tcp.ack.0.wrapping_sub(isn));
        if from == Side::R && tcp.flags.ack() && own > 1 << 16 {
            return;
        }
        if !tcp.flags.ack() && from == Side::R {
            let first_at = self.syn.filter(|syn| syn.0 == isn).map_or(at, |syn| syn.3);
            self.syn = Some((isn, offer, tsval, first_at));
            return;
        }
        let answer = from == Side::G && tcp.flags.ack();
        let same = answer && self.end(Side::R).isn.is_some_and(|r| r.wrapping_add(1) == tcp.ack.0);
        if same && self.end(Side::R).acked > BASE && self.end(Side::G).isn != Some(isn) {
            self.end_mut(from).tsvals.extend(tsval); // its clock all the same
            return; // another cookie, for a SYN that is answered for
        }
        let answers = if same { std::mem::take(&mut self.answers) } else { Vec::new() };
        // A SYN of G, or its SYN-ACK to R's SYN, begins a connection unless it repeats itself; the
        // answer to another SYN does, whatever number G begins with.
        let other = answer && !same && self.end(Side::R).isn.is_some();
        if from == Side::G && (self.end(Side::G).isn != Some(isn) || other) {
            self.begin_anew();
        }
        if answer {
            self.answers = answers;
            self.answers.push((isn, offer));
        }
        let (is_new, is_open) = (self.end(from).isn.is_none(), self.is_open());
        let window = u64::from(tcp.window);
        let e = self.end_mut(from);
        if is_new || e.isn == Some(isn) {
            e.tsvals.extend(tsval);
        }
        if is_new || e.isn == Some(isn) && !is_open {
            (e.isn, e.offer) = (Some(isn), offer);
            e.end = e.end.max(BASE + 1);
            if tcp.flags.ack() {
                e.acked = e.acked.max(BASE + 1);
                e.edge = BASE + 1 + window;
                e.edge_max = e.edge_max.max(e.edge);
            }
        }
        if answer {
            self.note_answered(at, tcp);
        } else if from == Side::R {
            self.quality.recovery.on_asked(at);
        }
    }

    /// R shows which of G's SYN-ACKs it has taken.
    pub(super) fn note_choice(&mut self, from: Side, tcp: &Tcp) {
        let chosen = |a: &&(u32, Offer)| a.0.wrapping_add(1) == tcp.ack.0;
        if from == Side::R
            && self.end(Side::R).acked == BASE
            && let Some(&(isn, offer)) = self.answers.iter().find(chosen)
        {
            let g = self.end_mut(Side::G);
            (g.isn, g.offer) = (Some(isn), offer);
            // Frames of the other connection are counted from another number.
            self.end_mut(Side::R).end_to = BASE + 1;
        }
    }

    /// The shift that R's SYN offers.
    pub(crate) fn scale_of_syn(&self) -> Option<u8> {
        self.syn.and_then(|(_, offer, ..)| offer.scale).map(|shift| shift.min(14))
    }

    /// G accepts what the host had accepted for it, and has this room.
    pub(crate) fn on_accepted(&mut self, window: u64) {
        let g = self.end_mut(Side::G);
        g.edge = BASE + 1 + window;
        g.edge_max = g.edge_max.max(g.edge);
        self.heard_from_guest = self.heard_from_remote;
        self.waits_for_guest = false;
    }

    /// G refuses that.
    pub(crate) fn on_refused(&mut self) {
        self.end_mut(Side::G).reset = true;
        self.waits_for_guest = false;
    }

    /// G did not answer, or was never asked.
    pub(crate) fn on_given_up(&mut self) {
        self.on_refused();
        self.was_given_up = true;
    }

    /// It is the clock of R's last SYN.
    pub(crate) fn is_clock_of_syn(&self, tsval: u32) -> bool {
        self.syn.is_some_and(|(_, _, of_syn, _)| of_syn == Some(tsval))
    }

    /// G has answered a SYN of R.
    fn note_answered(&mut self, at: Instant, tcp: &Tcp) {
        if let Some((isn, offer, tsval, first_at)) = self.syn
            && isn.wrapping_add(1) == tcp.ack.0
        {
            self.quality.recovery.on_asked(first_at);
            self.quality.recovery.on_answered(at);
            let r = self.end_mut(Side::R);
            if r.isn != Some(isn) {
                // The options of a repeated SYN are not those that G has accepted.
                (r.isn, r.offer, r.end) = (Some(isn), offer, r.end.max(BASE + 1));
            }
            r.tsvals.extend(tsval);
            // Later clocks are newer.
            self.acceptable.recent = self.acceptable.recent.or(tsval);
        }
    }

    /// Another connection begins: of the last one only the state of the machines stays.
    fn begin_anew(&mut self) {
        let waiting = [0, 1].map(|i: usize| std::mem::take(&mut self.ends[i].unchanged));
        let mut earlier = std::mem::take(&mut self.earlier);
        let conn = self.next.map(|next| next.0).or(self.conn);
        // Not itself, of which only its SYN is known (seed 39898).
        earlier.extend(self.conn.filter(|_| self.is_answered() && self.conn != conn));
        let streams = self.next.map(|next| streams_of(next.0, next.1));
        let streams = self.streams.map(|old| streams.unwrap_or(old));
        let owed_before = self.was_on && self.promised().is_some();
        // Of a SYN-ACK that went past the host R may echo the clock.
        let g = self.end_mut(Side::G);
        let unseen = g.isn.is_none().then(|| std::mem::take(&mut g.tsvals));
        *self = Self {
            known: self.known,
            ttl: self.ttl,
            cramped_at: self.cramped_at,
            offline: self.offline,
            state: self.state,
            paused_since: self.paused_since,
            silent_since: self.silent_since,
            syn: self.syn,
            next: self.next,
            earlier,
            ..Self::new(self.name, conn, self.opaque, streams)
        };
        if owed_before {
            fail_stop::on_begun_anew(self);
        }
        for (end, waiting) in self.ends.iter_mut().zip(waiting) {
            end.unchanged = waiting;
        }
        self.end_mut(Side::G).tsvals = unseen.unwrap_or_default();
    }
}
