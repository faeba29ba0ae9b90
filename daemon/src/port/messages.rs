//! Messages of a front-end: the answers to them, and their cost if they take more than their share
//! of time, because they map memory, the link goes up or down, or a ring with a long in-flight log
//! starts or stops.

use nightporter_core::time::{Duration, Instant};
use vhost::vhost_user::message::FrontendReq as Req;

use crate::vhost::device::Device;
use crate::vhost::protocol::{Broken, Channel, Message, Refusal, Reply};
use crate::vhost::session::Session;

/// The cost of a change of the link: a look at all connections of the VM.
pub(super) const COST_OF_LINK: u32 = 8;
/// So much may be spent in [`COST_INTERVAL`]: a VM that boots maps some dozen times, and its link
/// changes three or four times.
const COST_MAX: u32 = 64;
/// See [`COST_MAX`].
const COST_INTERVAL: Duration = Duration::from_secs(1);

/// The cost of obeying a message, besides its effects on the link and on rings with an in-flight
/// log: 1 for mapping memory.
pub(super) fn cost_of(message: &Message) -> u32 {
    let maps = matches!(
        message.request(),
        Some(
            Req::SET_MEM_TABLE
                | Req::ADD_MEM_REG
                | Req::REM_MEM_REG
                | Req::GET_INFLIGHT_FD
                | Req::SET_INFLIGHT_FD
                | Req::SET_LOG_BASE
        )
    );
    u32::from(maps)
}

/// The recent cost of a front-end's messages.
#[derive(Debug, Default)]
pub(super) struct Costs {
    sum: u32,
    since: Instant,
}

impl Costs {
    /// Another one did. `true`: that is enough for a while.
    #[must_use]
    pub(super) fn add(&mut self, now: Instant, cost: u32) -> bool {
        if now.since(self.since) >= COST_INTERVAL {
            (self.since, self.sum) = (now, 0);
        }
        self.sum += cost;
        self.sum >= COST_MAX
    }
}

/// Handles one message and replies. `Some` is why it was refused.
pub(super) fn answer<D: Device>(
    channel: &Channel,
    session: &mut Session<D>,
    message: Message,
) -> Result<Option<String>, Broken> {
    let (code, name, need_reply) = (message.code, message.name(), message.need_reply);
    let ack = |value: u64| channel.reply(code, &Reply::of(value));
    let outcome = session.handle(message);
    // Asked afterwards: UML 6.1 waits for the acknowledgement of the very SET_PROTOCOL_FEATURES
    // that negotiates it.
    let wants_ack = need_reply && session.acknowledges();
    match outcome {
        Ok(Some(reply)) => channel.reply(code, &reply).map(|()| None),
        Ok(None) if wants_ack => ack(0).map(|()| None),
        Ok(None) => Ok(None),
        Err(refusal) if wants_ack => ack(1).map(|()| Some(format!("{name}: {refusal}"))),
        // No request that we did not offer needs to end the connection.
        Err(refusal @ Refusal::Unsupported(_)) => Ok(Some(format!("{name}: {refusal}"))),
        Err(refusal) => Err(Broken::Refused { request: name, refusal }),
    }
}
