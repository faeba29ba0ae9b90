//! The two logs whose memory we share with a front-end: that of chains in flight, and that of
//! written pages while a VM may migrate (LIFE-15).

use std::sync::Arc;

use vhost::vhost_user::message::{
    FrontendReq as Req, VhostUserInflight, VhostUserLog, VhostUserVringState,
};
use vm_memory::ByteValued;

use super::Session;
use crate::vhost::Event;
use crate::vhost::device::{Device, DeviceQueue};
use crate::vhost::dirty::DirtyLog;
use crate::vhost::features::bit;
use crate::vhost::inflight::InflightLog;
use crate::vhost::protocol::{Message, Refusal, Reply};
use crate::vhost::ring::QUEUE_SIZE_MAX;
use crate::vhost::vring::Vring;

impl<D: Device> Session<D> {
    /// Whether the log of written pages has no place for one that was written.
    #[must_use]
    pub(crate) fn has_short_log(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.is_short())
    }

    /// Whether memory of one of them was not there when it was used.
    pub(super) fn have_logs_faulted(&self) -> bool {
        self.inflight.as_ref().is_some_and(InflightLog::has_faulted)
            || self.log.as_ref().is_some_and(|log| log.has_faulted())
    }

    /// The front-end wants a log of written pages (VHOST_F_LOG_ALL): its VM may migrate.
    #[must_use]
    pub(crate) fn logs(&self) -> bool {
        self.features() & bit::LOG_ALL != 0
    }

    /// A page was written that the log cannot say: what the front-end would take for the VM's
    /// memory is not.
    pub(super) fn check_log(&self) -> Result<(), Refusal> {
        if self.has_short_log() || self.have_logs_faulted() {
            return Err(Refusal::Value("the log of written pages is not all there"));
        }
        Ok(())
    }

    /// Whether this message would stop rings of a VM that may migrate.
    #[must_use]
    pub(crate) fn leaves_by(&self, message: &Message) -> bool {
        let state = || message.body::<VhostUserVringState>(0).ok();
        // One that a memory table or features have stopped may be all that is left.
        let runs = |it: &VhostUserVringState| {
            self.vrings.get(it.index as usize).is_some_and(Vring::is_configured)
        };
        let stops = match message.request() {
            Some(Req::GET_VRING_BASE) => state().is_some_and(|it| runs(&it)),
            Some(Req::RESET_OWNER | Req::RESET_DEVICE) => true,
            Some(Req::SET_STATUS) => message.body::<u64>(0).is_ok_and(|status| status == 0),
            Some(Req::SET_VRING_ENABLE) => {
                state().is_some_and(|it| it.num == 0 && it.index < 2 && runs(&it))
            }
            _ => false,
        };
        stops && self.logs() && self.vrings.iter().any(Vring::is_configured)
    }

    pub(super) fn create_inflight(&self, message: &Message) -> Result<Reply, Refusal> {
        let mut spec: VhostUserInflight = message.body(0)?;
        if usize::from(spec.num_queues) > self.vrings.len() || spec.queue_size > QUEUE_SIZE_MAX {
            return Err(Refusal::Value("more or larger queues than the device has"));
        }
        let (file, len) = InflightLog::create(spec.num_queues, spec.queue_size)?;
        spec.mmap_size = len;
        spec.mmap_offset = 0;
        Ok(Reply { payload: spec.as_slice().to_vec(), fd: Some(file) })
    }

    pub(super) fn set_inflight(&mut self, mut message: Message) -> Result<(), Refusal> {
        let spec: VhostUserInflight = message.body(0)?;
        let file = message.take_fd()?;
        self.check_seal(&file)?;
        self.inflight = Some(InflightLog::open(file, &spec)?);
        Ok(())
    }

    /// The answer says that nothing is marked in the log before it any more.
    pub(super) fn set_log(&mut self, message: &mut Message) -> Result<Reply, Refusal> {
        let spec: VhostUserLog = message.body(0)?;
        let file = message.take_fd()?;
        self.check_seal(&file)?;
        self.check_log()?;
        let log = DirtyLog::open(file, &spec)?;
        self.put_log(Some(Arc::new(log)));
        self.settle();
        Ok(Reply::of(0_u64))
    }

    /// The front-end has negotiated these; whether it logs is reported if that has changed.
    pub(super) fn put_features(&mut self, features: Option<u64>) {
        let logged = self.logs();
        self.features = features;
        if self.logs() != logged {
            self.events.push_back(Event::Logs(!logged));
        }
    }

    /// Once no ring is set up any more.
    pub(super) fn forget_log(&mut self) {
        if !self.vrings.iter().any(Vring::is_configured) {
            self.put_log(None);
        }
    }

    /// Pages of the one before, which the front-end may keep, count as its VM's (`charges`).
    pub(super) fn put_log(&mut self, log: Option<Arc<DirtyLog>>) {
        if let Some(before) = std::mem::replace(&mut self.log, log) {
            let (file, len) = before.file;
            self.share.note_file(file, len, &self.memory);
        }
    }

    /// Writes are marked in the log that is there, if the front-end wants that.
    pub(super) fn settle_log(&mut self) {
        let log = self.log.as_ref().filter(|_| self.logs());
        for queue in self.vrings.iter_mut().filter_map(|vring| vring.queue.as_mut()) {
            queue.ring().set_log(log.cloned());
        }
        self.memory.set_log(log.cloned());
    }
}
