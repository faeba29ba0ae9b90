//! A kind of device, with its queues; a session is generic over it.

use std::fmt::Debug;

use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

use super::ring::Ring;

/// A device that a front-end is offered.
pub trait Device: Clone + Copy + Debug {
    /// The queue on each of its rings.
    type Queue: DeviceQueue;

    /// How many queues it has.
    fn queues(&self) -> usize;

    /// The answer to GET_QUEUE_NUM.
    fn queue_num(&self) -> u64;

    /// The virtio features for a front-end that has negotiated `protocol`.
    fn features(&self, protocol: Protocol) -> u64;

    /// The protocol features.
    fn protocol(&self) -> Protocol;

    /// `len` bytes of the configuration space from `offset` on, zero where nothing is defined.
    fn config(&self, offset: usize, len: usize) -> Vec<u8>;

    /// The MTU that it tells, if it is a network card and has one.
    fn mtu(&self) -> Option<u16> {
        None
    }

    /// Whether front-ends may tell it an MTU, and announce a MAC.
    fn is_network_card(&self) -> bool;
}

/// A running queue, of either direction.
pub trait DeviceQueue: Debug {
    /// On a ring that was just started.
    fn new(ring: Ring) -> Self;

    /// The ring itself.
    fn ring(&mut self) -> &mut Ring;

    /// It may look at as much as in a turn again.
    fn begin_turn(&mut self);
}
