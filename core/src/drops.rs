//! Why a frame was dropped: one closed list for the counter, the metric label and the trace text.

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $label:literal,)+) => {
        /// Why a frame was not forwarded. Each reason is a counter per port.
        #[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
        #[repr(u8)]
        pub enum DropReason { $($(#[doc = $doc])+ $variant,)+ }

        impl DropReason {
            /// Every reason, in declaration order (`self as usize` indexes it).
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The stable snake_case name used as metric label and in traces.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)+ }
            }

            /// One sentence for operators: what happened.
            #[must_use]
            pub const fn doc(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),+),)+ }
            }
        }
    };
}

drop_reasons! {
    /// The frame is shorter than its own headers say, or than an Ethernet header.
    Truncated = "truncated",
    /// A header field contradicts another (IHL, data offset, total length).
    MalformedHeader = "malformed_header",
    /// The virtio-net header does not fit the frame (offsets, GSO type or size), or asks for a
    /// super-segment of more than 512 segments, or for one to a group.
    MalformedVirtioHeader = "malformed_virtio_header",
    /// The IPv4 header or TCP checksum is wrong and no trusted party vouched for it.
    BadChecksum = "bad_checksum",
    /// The source MAC is not the one that this port may use.
    SpoofedMac = "spoofed_mac",
    /// A VM without a configured MAC uses a MAC that was heard elsewhere within 300 s: behind an
    /// uplink, or from a VM that has just gone.
    MacElsewhere = "mac_elsewhere",
    /// The source IP is not on this port's list, is on another port's list, or cannot be a host's;
    /// or the port has a list, and the frame speaks for other hosts or cannot be checked.
    SpoofedIp = "spoofed_ip",
    /// The destination is a group address that bridges do not forward (802.1D).
    ReservedGroup = "reserved_group",
    /// The frame would leave by the port it came from.
    Hairpin = "hairpin",
    /// The VM is not in the VLAN of the frame, or the frame has a tag that the VM may not set.
    Vlan = "vlan",
    /// The frame goes from one VM to another, and one of them is isolated.
    Isolated = "isolated",
    /// The VM sends or receives more than its rate limit.
    RateLimit = "rate_limit",
    /// The VM sends more frames to groups than its limit: 1,000 at once, 10,000 a second.
    Storm = "storm",
    /// The destination port has no driver listening (link down, driver reset), or is an overlay
    /// that has no peers or reaches none of them.
    PortDown = "port_down",
    /// The destination queue and its backlog are full.
    QueueFull = "queue_full",
    /// The frame is too long for the destination or for the `mtu` of the receiving VM and may not
    /// be segmented (no GSO metadata), or it is for a group and longer than 9,234 bytes.
    TooBig = "too_big",
    /// The flow is in ABORT, where only challenge ACKs get an answer.
    FlowAborted = "flow_aborted",
    /// The TCP segment has a combination of flags that no conforming sender makes (COM-06).
    BadFlags = "bad_flags",
    /// PAWS: the timestamp is older than one seen before (RFC 7323 section 5).
    Paws = "paws",
    /// The sequence range is outside the window that the host advertised (SNOOP-02).
    OutOfWindow = "out_of_window",
    /// The segment repeats bytes that were already accepted (SNOOP-11).
    Duplicate = "duplicate",
    /// The acknowledgement number is outside the sent data (SNOOP-03, INV-12).
    BadAck = "bad_ack",
    /// The segment is an RST whose sequence number is not exact (SNOOP-15).
    BadRst = "bad_rst",
    /// The segment is a SYN on a live flow; the answer is a challenge ACK (SNOOP-17).
    SynOnLiveFlow = "syn_on_live_flow",
    /// The segment is in the window, but no store page is free; it is not acknowledged (LIFE-03).
    NoStore = "no_store",
    /// Out-of-order data exceeds the flow's limits; the segment is not acknowledged (SNOOP-10).
    OutOfOrderLimit = "out_of_order_limit",
    /// The segment has urgent data or an unknown option, and earlier bytes must be delivered first,
    /// or frames have passed the daemon by; the sender will repeat it.
    Draining = "draining",
    /// The datagram is not VXLAN: it is too short for the header, or names no network.
    NotVxlan = "not_vxlan",
    /// The datagram belongs to another VXLAN network than the overlay.
    UnknownVni = "unknown_vni",
    /// The datagram comes from a host that is not a peer of the overlay.
    UnknownPeer = "unknown_peer",
    /// The tunnel's header reports congestion, and the sender of the inner packet does not
    /// understand marks (RFC 6040 section 4.2).
    EcnMismatch = "ecn_mismatch",
}
