//! The counters of a VM: one list for the fields, the operator's names and the metrics.

/// A counter as operators see it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Counter {
    /// The name in the control protocol.
    pub name: &'static str,
    /// The name in the metrics, without prefix and suffix.
    pub metric: &'static str,
    doc: &'static str,
}

impl Counter {
    /// The help text, without a full stop.
    #[must_use]
    pub fn help(&self) -> &'static str {
        self.doc.trim().trim_end_matches('.')
    }
}

macro_rules! vm_counters {
    ($(#[doc = $doc:literal] $name:ident = $metric:literal,)+) => {
        /// Counters of one VM since its port was added.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        pub struct VmCounters { $(#[doc = $doc] pub $name: u64,)+ }

        impl VmCounters {
            /// Every counter, in declaration order.
            pub const ALL: &[Counter] =
                &[$(Counter { name: stringify!($name), metric: $metric, doc: $doc },)+];

            /// Every value, in the order of [`Self::ALL`].
            #[must_use]
            pub fn values(&self) -> [u64; Self::ALL.len()] {
                [$(self.$name,)+]
            }
        }
    };
}

vm_counters! {
    /// Payload bytes acknowledged ahead of the guest.
    early_acked_bytes = "early_acked_bytes",
    /// ACKs made on the guest's behalf.
    acks_made = "early_acks",
    /// Pure ACKs of the guest that were not forwarded.
    acks_absorbed = "absorbed_acks",
    /// Frames sent to the guest again.
    local_retransmissions = "local_retransmissions",
    /// Connections that were offloaded.
    flows_offloaded = "flows_offloaded",
    /// Connections refused or let go for lack of budget, record or table space.
    flows_refused = "flows_refused",
    /// Connections that were not offloaded, or no longer, because they end behind the guest.
    flows_not_local = "flows_not_local",
    /// Connections that the host reset.
    flows_aborted = "flows_aborted",
    /// Connections that the host has accepted for the guest.
    flows_accepted = "flows_accepted",
    /// Of these, connections that the guest has refused, or not answered.
    accepts_refused = "accepts_refused",
    /// Payload bytes sent to remotes for the guest, each counted once.
    sent_for_guest_bytes = "sent_for_guest_bytes",
    /// Segments sent to remotes for the guest, each counted once.
    sent_for_guest_segments = "sent_for_guest_segments",
    /// Segments sent to remotes again for the guest.
    remote_retransmissions = "remote_retransmissions",
    /// Retransmission timeouts toward remotes.
    remote_timeouts = "remote_timeouts",
    /// ACKs of remotes that were not forwarded, because the host repeats lost data itself.
    acks_hidden = "hidden_acks",
    /// Segments that the guest sent again although the host keeps them.
    guest_copies = "absorbed_guest_copies",
    /// Times that the host began to send for a connection.
    flows_flooded = "flows_flooded",
    /// Segments forwarded as the guest sent them, because there was no place to keep them.
    floods_refused = "floods_refused",
    /// Times that a connection was given back to the guest's own congestion control.
    flows_handed_back = "flows_handed_back",
}
