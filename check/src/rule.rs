//! The possible violations: the invariants of the specification, and the rules about time and
//! quality.

use core::fmt;

use crate::tap::FlowName;

macro_rules! rules {
    ($($rule:ident $id:literal $doc:literal;)+) => {
        /// An invariant or a rule; each is a file in `rules`.
        #[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
        pub enum Rule {
            $(#[doc = $doc] $rule,)+
        }

        impl Rule {
            /// Each of them.
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$rule),+];

            /// Its name: INV-01 to INV-25 as in the specification, or a word.
            #[must_use]
            pub const fn id(self) -> &'static str {
                match self {
                    $(Self::$rule => $id,)+
                }
            }
        }
    };
}

rules! {
    BytesToGuest "INV-01" "What G gets is what R wrote.";
    BytesToNet "INV-02" "What R gets is what G wrote.";
    Held "INV-03" "Every byte that R was told is safe is held.";
    EarlyFin "INV-04" "SYN and FIN are acknowledged by G only.";
    RightEdge "INV-05" "The right edge shown to R never moves left.";
    Budget "INV-06" "What is promised is within the VM's budget.";
    AckOrder "INV-07" "ACK numbers never decrease.";
    TsvalOrder "INV-08" "TSvals never decrease.";
    TsvalOwner "INV-09" "TSvals are those of the end that is spoken for.";
    SequenceNumbers "INV-10" "Segments lie in their receiver's window.";
    AckNumbers "INV-11" "Nothing is acknowledged that was not sent.";
    UnsentAck "INV-12" "Nothing is acknowledged to G that was not on the wire.";
    DeliveryFits "INV-13" "New bytes for G end at its right edge.";
    WireConformance "INV-14" "R gets what G sent, once each.";
    Immutable "INV-15" "All copies of a byte are the same.";
    OneEndpoint "INV-16" "The trace looks like one endpoint of RFC 9293.";
    PurePass "INV-17" "Without offload all passes as it is.";
    Liveness "INV-18" "All comes to its end, without a storm.";
    DeadGuest "INV-19" "Nobody answers for a guest that is gone.";
    Isolation "INV-20" "Each VM finds what is its own.";
    FailStop "INV-21" "A broken promise is told to both sides.";
    Checksums "INV-22" "Checksums are right, or a right beginning of one.";
    ForeignOptions "INV-23" "What is not understood passes bit by bit.";
    CongestionMarks "INV-24" "Congestion marks are conserved.";
    EarlyAcceptance "INV-25" "Nothing is accepted that G would not accept.";
    PromptAck "PROMPT-ACK" "R gets its ACK in time.";
    Fields "FIELDS" "Each header field has its owner's value.";
    Recovery "RECOVERY" "What G lost is offered again, in time and not before.";
    Economy "ECONOMY" "G is not given more again than it would get without the host.";
    Echo "ECHO" "Clocks and congestion are echoed as they were said.";
    Duplicates "DUPLICATES" "Duplicates of R are answered by DSACK.";
    Window "WINDOW" "R is shown the window that G shows.";
    OddAcks "ODD-ACKS" "Answers to odd segments are limited.";
    Turns "TURNS" "Flows take turns at a ring.";
    News "NEWS" "ACKs that nobody asked for say something new.";
    Endings "ENDINGS" "What ends for one end ends for the other, and for the host.";
    Parked "PARKED" "An idle flow gives its place back, and no other does.";
    LateAck "LATE-ACK" "Who acknowledges late promises nothing.";
    Flooding "FLOODING" "A guest that may flood past the host is stopped.";
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// A rule that does not hold.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Violation {
    /// Which.
    pub rule: Rule,
    /// The observation, in one line.
    pub what: String,
    /// The flow it concerns, if it concerns one.
    pub flow: Option<FlowName>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.what)
    }
}
