//! The state of a connection, and every transition from one state to another.
//!
//! [`Standing`] alone changes a state, by [`after`]; a test prints the whole table.
//! `lifecycle` and `handshake` know when an event happens, and do its other work.

use crate::flow::table::Class;
use crate::tcp::accept::opening::Opening;
use crate::tcp::options::Offers;
use crate::wire::saved::{BadImage, Reader, Saved, Writer, saved_enum};
use crate::wire::seq::Seq;

/// Where the connection stands.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum State {
    /// Handshake observed, options being learned.
    ///
    /// *Operations*: everything is forwarded verbatim. *Caveats*: owns no record, no reservation.
    Handshake,
    /// H has answered R's SYN, and R its answer; G has yet to accept the connection (ACC-03).
    ///
    /// *Operations*: toward R as `On`, with the room of H's SYN-ACK; toward G there is a SYN.
    Opening,
    /// The inbound pipe is in the path: every packet goes through an emission gate.
    On,
    /// As `On`, but R's bytes are acknowledged late (LIFE-12). Goes to `Pass` when quiescent.
    Drain,
    /// Forwarded verbatim. *Operations*: entered only when H owes nothing; after an absence of the
    /// daemon it may end by [`Self::Drain`] (COM-28).
    Pass,
    /// H had answered R's SYN, and both sides have closed. *Operations*: in place of `Pass`, the
    /// numbers of each frame are edited (ACC-04).
    Translated,
    /// RSTs were or are being sent. *Operations*: only challenge ACKs are answered, for 60 s.
    Abort,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 7] = [
        Self::Handshake,
        Self::Opening,
        Self::On,
        Self::Drain,
        Self::Pass,
        Self::Translated,
        Self::Abort,
    ];

    /// The stable lower-case name used by the CLI and as metric label.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Opening => "opening",
            Self::On => "on",
            Self::Drain => "drain",
            Self::Pass => "pass",
            Self::Translated => "translated",
            Self::Abort => "abort",
        }
    }
}

/// Why a flow is not (or no longer) in `On`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Why {
    /// Nothing stands against it.
    Nothing,
    /// An option outside the whitelist: MPTCP, MD5, AO, AccECN, unknown.
    /// COM-05, SNOOP-20 to SNOOP-23.
    Options,
    /// SYN copies disagree, or a simultaneous open (COM-24, COM-25).
    Ambiguous,
    /// No budget, record or window to promise (SNOOP-09, LIFE-01).
    NoBudget,
    /// Urgent data is under way; temporary (SNOOP-13).
    Urgent,
    /// The operator turned the offload off, or the daemon is stopping.
    Operator,
    /// The guest was given bytes, and has sent nothing for five seconds: it answers by another path
    /// (SNOOP-42).
    Asymmetric,
    /// The remote acknowledges bytes that the host did not see the guest send (SNOOP-42).
    Unseen,
    /// Both sides have closed.
    Closed,
    /// One side sent a valid RST.
    Reset,
    /// The guest would not take bytes H had promised (SNOOP-32).
    GuestRefuses,
    /// The VM is gone (LIFE-05).
    GuestGone,
    /// A predecessor's promises could not be kept (LIFE-09).
    Restart,
    /// It ends behind the guest (FWD-02).
    NotLocal,
    /// The daemon was away, and frames passed it by (LIFE-17).
    PassedPlain,
}

saved_enum!(Why {
    Nothing = 0, Options = 1, Ambiguous = 2, NoBudget = 3, Urgent = 4, Operator = 5,
    Asymmetric = 6, Unseen = 7, Closed = 8, Reset = 9, GuestRefuses = 10, GuestGone = 11,
    Restart = 12, NotLocal = 13, PassedPlain = 14,
});

impl Why {
    /// The stable snake_case name used by the CLI and logs.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Options => "options",
            Self::Ambiguous => "ambiguous",
            Self::NoBudget => "no_budget",
            Self::Urgent => "urgent",
            Self::Operator => "operator",
            Self::Asymmetric => "asymmetric",
            Self::Unseen => "unseen",
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::GuestRefuses => "guest_refuses",
            Self::GuestGone => "guest_gone",
            Self::Restart => "restart",
            Self::NotLocal => "not_local",
            Self::PassedPlain => "passed_plain",
        }
    }

    /// The flow comes back to `On` by itself once its cause has passed.
    const fn temporary(self) -> bool {
        matches!(self, Self::Urgent | Self::PassedPlain)
    }

    /// The same, or once it is called off.
    const fn revocable(self) -> bool {
        self.temporary() || matches!(self, Self::Operator)
    }
}

/// The ends whose segments have shown the numbers of a flow that may come back (COM-28).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heard {
    pub(crate) guest: bool,
    pub(crate) net: bool,
}

/// A state, and the data that only this state has; in the order of [`State`], so that one is the
/// other's number.
#[derive(Debug)]
enum Position {
    /// The offers of the two sides so far.
    Handshake(Box<Offers>),
    /// H's handshake with G.
    Opening(Box<Opening>),
    On,
    Drain(Why),
    /// `unnoticed`: nobody has considered yet that G may flood this connection (FLOOD-28).
    /// `heard`: for a flow that may come back.
    Pass {
        why: Why,
        unnoticed: bool,
        heard: Option<Heard>,
    },
    Translated,
    /// `tell_guest`: an RST to G is due now.
    Abort {
        why: Why,
        tell_guest: bool,
    },
}

impl Saved for Position {
    fn saved(&self, image: &mut Writer) {
        match self {
            Self::Handshake(offers) => (0_u8, **offers).saved(image),
            Self::On => 1_u8.saved(image),
            Self::Drain(why) => (2_u8, *why).saved(image),
            // A VM whose frames can pass plain has no image.
            Self::Pass { why, unnoticed, heard: _ } => (3_u8, (*why, *unnoticed)).saved(image),
            Self::Abort { why, tell_guest } => (4_u8, (*why, *tell_guest)).saved(image),
            Self::Opening(opening) => (5_u8, **opening).saved(image),
            Self::Translated => 6_u8.saved(image),
        }
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        Ok(match u8::of_saved(image)? {
            0 => Self::Handshake(Box::of_saved(image)?),
            1 => Self::On,
            2 => Self::Drain(Why::of_saved(image)?),
            3 => {
                let (why, unnoticed) = <(Why, bool)>::of_saved(image)?;
                Self::Pass { why, unnoticed, heard: None }
            }
            4 => {
                let (why, tell_guest) = <(Why, bool)>::of_saved(image)?;
                Self::Abort { why, tell_guest }
            }
            5 => Self::Opening(Box::of_saved(image)?),
            6 => Self::Translated,
            _ => return Err(BadImage::Impossible("Position")),
        })
    }
}

/// An event that moves a flow from one state to another.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The handshake is complete, all is understood, and there is a place for the first window.
    TakenOn,
    /// G has accepted a connection that H had accepted for it.
    Accepted,
    /// Both sides of such a connection have closed.
    Closed,
    /// Late acknowledgements from here on, then out of the path.
    Drain(Why),
    /// The reason to drain is over, or was called off, and nothing is owed.
    Resumed,
    /// The numbers of a flow that was out of the path for a while are known again.
    Returned,
    /// Out of the path, owing nothing.
    Left(Why),
    /// A promise cannot or need not be kept; `tell_guest`: G was not told yet.
    Reset(Why, bool),
}

/// Where an event leads; `None`: nowhere, the flow stays as it is.
const fn after(position: &Position, event: Event) -> Option<Position> {
    Some(match (position, event) {
        (Position::Handshake(_), Event::TakenOn) => Position::On,
        (Position::Opening(_), Event::Accepted) => Position::On,
        (Position::On | Position::Drain(_), Event::Closed) => Position::Translated,
        (Position::On, Event::Drain(why)) => Position::Drain(why),
        (Position::Drain(before), Event::Drain(why))
            if before.temporary() || (before.revocable() && !why.revocable()) =>
        {
            Position::Drain(why)
        }
        (Position::Drain(why), Event::Resumed) if why.revocable() => Position::On,
        (Position::Pass { why, heard: Some(_), .. }, Event::Returned) => Position::Drain(*why),
        (Position::Handshake(_) | Position::On | Position::Drain(_), Event::Left(why)) => {
            // Of a connection that H refuses the guest is told at once.
            Position::Pass { why, unnoticed: matches!(why, Why::Ambiguous), heard: None }
        }
        // From `Handshake` only after a restart, by a flow rebuilt from its record.
        (
            Position::Handshake(_)
            | Position::Opening(_)
            | Position::On
            | Position::Drain(_)
            | Position::Translated,
            Event::Reset(why, tell_guest),
        ) => Position::Abort { why, tell_guest },
        _ => return None,
    })
}

/// The place a flow stands at.
#[derive(Debug)]
pub(crate) struct Standing(Position);

impl Saved for Standing {
    fn saved(&self, image: &mut Writer) {
        self.0.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        Position::of_saved(image).map(Self)
    }
}

impl Standing {
    /// A handshake that began with these offers.
    pub(crate) fn handshake(offers: Offers) -> Self {
        Self(Position::Handshake(Box::new(offers)))
    }

    /// H has accepted a connection for G.
    pub(crate) fn opening(opening: Opening) -> Self {
        Self(Position::Opening(Box::new(opening)))
    }

    /// The state.
    #[inline]
    pub(crate) const fn state(&self) -> State {
        match self.0 {
            Position::Handshake(_) => State::Handshake,
            Position::Opening(_) => State::Opening,
            Position::On => State::On,
            Position::Drain(_) => State::Drain,
            Position::Pass { .. } => State::Pass,
            Position::Translated => State::Translated,
            Position::Abort { .. } => State::Abort,
        }
    }

    /// Why the flow is there.
    pub(crate) const fn why(&self) -> Why {
        match self.0 {
            Position::Handshake(_) | Position::Opening(_) | Position::On => Why::Nothing,
            Position::Translated => Why::Closed,
            Position::Drain(why) | Position::Pass { why, .. } | Position::Abort { why, .. } => why,
        }
    }

    /// In the path: `Opening`, `On` or `Drain`.
    #[inline]
    pub(crate) const fn is_live(&self) -> bool {
        matches!(self.0, Position::Opening(_) | Position::On | Position::Drain(_))
    }

    /// H's handshake with G, while `Opening`.
    #[inline]
    pub(crate) fn as_opening(&self) -> Option<&Opening> {
        if let Position::Opening(opening) = &self.0 { Some(opening) } else { None }
    }

    /// R's initial sequence number, while `Opening`.
    pub(crate) fn isn_of_net(&self) -> Option<Seq> {
        self.as_opening().map(|opening| opening.grant().of_net().isn)
    }

    /// The same, to change.
    pub(crate) fn as_opening_mut(&mut self) -> Option<&mut Opening> {
        if let Position::Opening(opening) = &mut self.0 { Some(opening) } else { None }
    }

    /// While `Pass`: G has sent no data yet on a connection that H could not follow from its
    /// handshake on.
    pub(crate) const fn is_unnoticed(&self) -> bool {
        matches!(self.0, Position::Pass { unnoticed: true, .. })
    }

    /// While `Pass`: the ends that have been heard, if the flow may come back.
    #[inline]
    pub(crate) const fn heard(&self) -> Option<Heard> {
        if let Position::Pass { heard, .. } = self.0 { heard } else { None }
    }

    /// While `Pass`: these have, and it may come back; or it may not.
    pub(crate) const fn set_heard(&mut self, of: Option<Heard>) {
        if let Position::Pass { heard, .. } = &mut self.0 {
            *heard = of;
        }
    }

    /// New promises are made.
    #[inline]
    pub(crate) const fn is_on(&self) -> bool {
        matches!(self.0, Position::On)
    }

    /// `Drain`, and why.
    #[inline]
    pub(crate) const fn draining(&self) -> Option<Why> {
        if let Position::Drain(why) = self.0 { Some(why) } else { None }
    }

    /// `Drain`, for a temporary reason.
    pub(crate) const fn may_resume(&self) -> bool {
        matches!(self.0, Position::Drain(why) if why.temporary())
    }

    /// The offers, while `Handshake`.
    pub(crate) const fn offers(&self) -> Option<&Offers> {
        if let Position::Handshake(offers) = &self.0 { Some(offers) } else { None }
    }

    /// The same, with the offers of another SYN.
    pub(crate) fn learn(&mut self, offers: Offers) {
        if let Position::Handshake(known) = &mut self.0 {
            **known = offers;
        }
    }

    /// G has yet to get an RST.
    #[inline]
    pub(crate) const fn is_guest_untold(&self) -> bool {
        matches!(self.0, Position::Abort { tell_guest: true, .. })
    }

    /// While `Abort`: an RST to G is due, or no longer.
    pub(crate) const fn tell_guest(&mut self, due: bool) {
        if let Position::Abort { tell_guest, .. } = &mut self.0 {
            *tell_guest = due;
        }
    }

    /// While `Pass`: G sends data. `true`: for the first time, on a connection that H could not
    /// follow from its handshake on.
    pub(crate) const fn on_data_past(&mut self) -> bool {
        match &mut self.0 {
            Position::Pass { unnoticed, .. } => core::mem::replace(unnoticed, false),
            _ => false,
        }
    }

    /// The value of the entry when the table is full.
    pub(crate) const fn class(&self) -> Class {
        match self.0 {
            Position::Handshake(_) => Class::Unproven,
            Position::Opening(_)
            | Position::On
            | Position::Drain(_)
            | Position::Translated
            | Position::Abort { tell_guest: true, .. } => Class::Live,
            Position::Pass { .. } | Position::Abort { .. } => Class::Spent,
        }
    }

    /// `Handshake` to `On`: the third ACK was seen, and there is a place for the first window.
    pub(crate) fn take_on(&mut self) {
        self.must(Event::TakenOn);
    }

    /// `Opening` to `On`.
    pub(crate) fn accept(&mut self) {
        self.must(Event::Accepted);
    }

    /// `On` or `Drain` to `Translated`.
    pub(crate) fn close_translated(&mut self) {
        self.must(Event::Closed);
    }

    /// `On` to `Drain`. A flow that drains for good goes on to do so for its first such reason.
    pub(crate) fn drain(&mut self, why: Why) {
        self.go(Event::Drain(why));
    }

    /// `Drain` back to `On`, if its reason may pass or was called off.
    pub(crate) fn resume(&mut self) {
        self.must(Event::Resumed);
    }

    /// `Pass` to `Drain`: the flow is on its way back.
    pub(crate) fn come_back(&mut self) {
        self.must(Event::Returned);
    }

    /// `Handshake`, `On` or `Drain` to `Pass`, for life, unless [`Self::set_heard`] says otherwise.
    pub(crate) fn leave(&mut self, why: Why) {
        self.must(Event::Left(why));
    }

    /// `Opening`, `On` or `Drain` to `Abort`. `tell_guest`: an RST to G is due.
    pub(crate) fn abort(&mut self, why: Why, tell_guest: bool) {
        self.must(Event::Reset(why, tell_guest));
    }

    /// The event leads somewhere, or the caller is wrong.
    fn must(&mut self, event: Event) {
        let moved = self.go(event);
        debug_assert!(moved, "{event:?} in {:?}", self.state());
    }

    fn go(&mut self, event: Event) -> bool {
        let next = after(&self.0, event);
        let moved = next.is_some();
        if let Some(next) = next {
            self.0 = next;
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::accept::grant::tests::{ALL, grant, offered};
    use std::fmt::Write as _;

    /// Every state and every event; `-` is an event that changes nothing.
    const TRANSITIONS: &str = "
             TakenOn Accepted Drain/Opt Drain/Ope Drain/Urg Resumed Left Closed     Reset Returned
Handshake    On      -        -         -         -         -       Pass -          Abort -
Opening      -       On       -         -         -         -       -    -          Abort -
On           -       -        Drain/Opt Drain/Ope Drain/Urg -       Pass Translated Abort -
Drain/Opt    -       -        -         -         -         -       Pass Translated Abort -
Drain/Ope    -       -        Drain/Opt -         -         On      Pass Translated Abort -
Drain/Urg    -       -        Drain/Opt Drain/Ope Drain/Urg On      Pass Translated Abort -
Pass         -       -        -         -         -         -       -    -          -     -
Pass for now -       -        -         -         -         -       -    -          -     Drain/Urg
Translated   -       -        -         -         -         -       -    -          Abort -
Abort        -       -        -         -         -         -       -    -          -     -
";

    fn opening() -> Opening {
        Opening::new(grant(ALL - 1, &offered(ALL - 1)))
    }

    fn name(position: &Position) -> String {
        match position {
            Position::Handshake(_) => "Handshake".into(),
            Position::Opening(_) => "Opening".into(),
            Position::Translated => "Translated".into(),
            Position::On => "On".into(),
            Position::Drain(why) => format!("Drain/{:.3}", format!("{why:?}")),
            Position::Pass { heard: Some(_), .. } => "Pass for now".into(),
            Position::Pass { .. } => "Pass".into(),
            Position::Abort { .. } => "Abort".into(),
        }
    }

    #[test]
    fn the_table_of_all_transitions() {
        let offers = Offers::default();
        let positions = [
            Position::Handshake(Box::new(offers)),
            Position::Opening(Box::new(opening())),
            Position::On,
            Position::Drain(Why::Options),
            Position::Drain(Why::Operator),
            Position::Drain(Why::Urgent),
            Position::Pass { why: Why::Closed, unnoticed: false, heard: None },
            Position::Pass { why: Why::Urgent, unnoticed: false, heard: Some(Heard::default()) },
            Position::Translated,
            Position::Abort { why: Why::Reset, tell_guest: true },
        ];
        let events = [
            Event::TakenOn,
            Event::Accepted,
            Event::Drain(Why::Options),
            Event::Drain(Why::Operator),
            Event::Drain(Why::Urgent),
            Event::Resumed,
            Event::Left(Why::Options),
            Event::Closed,
            Event::Reset(Why::Reset, true),
            Event::Returned,
        ];
        let widths = [8, 9, 10, 10, 10, 8, 5, 11, 6, 12];
        let mut table = format!("\n{:13}", "");
        for (event, width) in events.iter().zip(widths) {
            let name = match event {
                Event::Drain(why) => format!("Drain/{:.3}", format!("{why:?}")),
                Event::Left(_) => "Left".into(),
                Event::Reset(..) => "Reset".into(),
                Event::TakenOn
                | Event::Accepted
                | Event::Resumed
                | Event::Closed
                | Event::Returned => format!("{event:?}"),
            };
            let _ = write!(table, "{name:width$}");
        }
        for position in &positions {
            let _ = write!(table, "\n{:13}", name(position));
            for (event, width) in events.iter().zip(widths) {
                let to = after(position, *event).map_or("-".into(), |to| name(&to));
                let _ = write!(table, "{to:width$}");
            }
        }
        let trimmed: Vec<_> = table.lines().map(str::trim_end).collect();
        assert_eq!(trimmed.join("\n") + "\n", TRANSITIONS, "{table}");
    }

    #[test]
    fn a_reset_that_the_guest_has_not_heard_of_keeps_its_entry() {
        let mut standing = Standing(Position::On);
        standing.abort(Why::GuestRefuses, true);
        assert_eq!((standing.class(), standing.why()), (Class::Live, Why::GuestRefuses));
        standing.tell_guest(false);
        assert_eq!((standing.class(), standing.is_guest_untold()), (Class::Spent, false));
    }
}
