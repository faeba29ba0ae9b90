//! UCX's worker, behind an interface that is safe to use: endpoints, and active messages both ways.
//!
//! All of it is for one thread, that of the worker. UCX calls back only from within calls of
//! [`Worker`]; what it says then is put into an inbox, which is read when that call has returned.
//! Memory that is sent is our own, and stays where it is until UCX says that it is done. A long
//! message that has come is memory of UCX's, which stays where it is until it is dropped.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::rc::Rc;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use self::sys::{
    ucp_address_t, ucp_am_handler_param_t, ucp_am_recv_param_t, ucp_context_h, ucp_ep_h,
    ucp_ep_params_t, ucp_params_t, ucp_request_param_t, ucp_worker_attr_t, ucp_worker_h,
    ucp_worker_params_t, ucs_status_t,
};
use super::{EndId, Event, HEAD_LEN, HELD_MIN, Head, PAYLOAD_MAX, Payload};

#[allow(dead_code, missing_docs, nonstandard_style, unreachable_pub)]
#[allow(clippy::all, clippy::pedantic)]
mod sys {
    include!(concat!(env!("OUT_DIR"), "/ucp.rs"));
}

/// The one active message that there is.
const AM_ID: u32 = 0;
/// `ucp_dt_make_contig(1)`: bytes (ucp.h).
const BYTES: u64 = 1 << sys::UCP_DATATYPE_SHIFT;

/// UCX's refusal, in its words.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Refused(ucs_status_t);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: it is a string that UCX never frees, whatever the number.
        // JUSTIFICATION: nobody else knows what a status means.
        let text = unsafe { CStr::from_ptr(sys::ucs_status_string(self.0)) };
        f.write_str(&text.to_string_lossy())
    }
}

impl EndId {
    fn of(ep: ucp_ep_h) -> Self {
        Self(ep.expose_provenance())
    }

    fn ep(self) -> ucp_ep_h {
        ptr::with_exposed_provenance_mut(self.0)
    }
}

/// The reports of callbacks.
#[derive(Debug, Default)]
struct Inbox {
    said: VecDeque<Said>,
}

/// As of [`Event`].
#[derive(Debug)]
enum Said {
    Arrived(Head, Vec<u8>),
    /// So many bytes in UCX's memory, which are ours to release.
    Held(Head, *mut u8, usize),
    Sent(u64, usize),
    Failed(EndId),
}

/// UCX's worker, as long as somebody has something of it.
#[derive(Debug)]
struct Shared {
    context: ucp_context_h,
    worker: ucp_worker_h,
    /// Of a box, which is freed after the worker.
    inbox: *mut Inbox,
}

/// Payload of a message that has come, in UCX's memory.
#[derive(Debug)]
pub(in super::super) struct Held {
    shared: Rc<Shared>,
    start: *mut u8,
    len: usize,
}

impl Held {
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: UCX has said that so many bytes are there until they are released, and writes no
        // more to them; the worker that they are of is there as long as `shared`.
        // JUSTIFICATION: without this they would be copied once more.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: it is released once, to its worker, and not from within a callback.
        // JUSTIFICATION: as of `Worker::new`.
        unsafe { sys::ucp_am_data_release(self.shared.worker, self.start.cast()) };
    }
}

/// A message that UCX has not let go of.
struct Pending {
    inbox: *mut Inbox,
    owner: u64,
    head: [u8; HEAD_LEN],
    payload: Vec<u8>,
}

/// See the module's doc.
#[derive(Debug)]
pub(crate) struct Worker {
    shared: Rc<Shared>,
    fd: i32,
    address: Vec<u8>,
    ends: BTreeSet<EndId>,
}

// SAFETY: nothing of UCX's worker belongs to the thread that made it (UCS_THREAD_MODE_SERIALIZED:
// one thread at a time), and the inbox is used from within calls of this alone. `shared` is its own
// until a message has come, which is after it was given to the thread that it stays with.
// JUSTIFICATION: it is made before the system calls are shut away and given to the worker's thread.
unsafe impl Send for Worker {}

/// Of what a library's struct has, the fields that are not given are not looked at: zeros.
fn zeroed<T: Copy>() -> T {
    // SAFETY: only used for structs of C of integers, pointers and optional functions.
    // JUSTIFICATION: C's way to leave fields out.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn ok(status: ucs_status_t) -> Result<(), Refused> {
    if status == sys::UCS_OK { Ok(()) } else { Err(Refused(status)) }
}

/// When it is loaded, UCX takes signals that tell of bugs, to print where; it would start other
/// programs for that. SIGBUS is the daemon's, as soon as there is a mapping of a guest's.
fn leave_signals_alone() {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    let all = [Signal::SIGSEGV, Signal::SIGILL, Signal::SIGFPE, Signal::SIGBUS, Signal::SIGHUP];
    for signal in all {
        // SAFETY: the default action runs no code of ours.
        // JUSTIFICATION: UCX reads whether it may before main() begins.
        let _ = unsafe { sigaction(signal, &default) };
    }
}

/// A pointer that may be a status instead (`UCS_PTR_IS_ERR`, ucs/type/status.h).
fn is_error(pointer: *mut c_void) -> Option<ucs_status_t> {
    let value = ucs_status_t::try_from(pointer.addr().cast_signed()).ok()?;
    (sys::UCS_ERR_LAST..0).contains(&value).then_some(value)
}

impl Worker {
    /// As the environment's `UCX_*` say.
    ///
    /// # Errors
    /// UCX's.
    pub(crate) fn new() -> Result<Self, Refused> {
        leave_signals_alone();
        let mut context = ptr::null_mut();
        let mut params: ucp_params_t = zeroed();
        params.field_mask = u64::from(sys::UCP_PARAM_FIELD_FEATURES);
        params.features = u64::from(sys::UCP_FEATURE_AM | sys::UCP_FEATURE_WAKEUP);
        // SAFETY: `params` says which of its fields count, and the context is used if all is well.
        // JUSTIFICATION: UCX is a library of C.
        let made = unsafe {
            let (major, minor) = (sys::UCP_API_MAJOR, sys::UCP_API_MINOR);
            sys::ucp_init_version(major, minor, &raw const params, ptr::null(), &raw mut context)
        };
        ok(made)?;
        let mut worker = ptr::null_mut();
        let mut params: ucp_worker_params_t = zeroed();
        params.field_mask = u64::from(sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = sys::UCS_THREAD_MODE_SERIALIZED;
        // SAFETY: the context was made above; as above.
        // JUSTIFICATION: as above.
        let made = unsafe { sys::ucp_worker_create(context, &raw const params, &raw mut worker) };
        if let Err(refused) = ok(made) {
            // SAFETY: nothing else has it.
            // JUSTIFICATION: as above.
            unsafe { sys::ucp_cleanup(context) };
            return Err(refused);
        }
        let inbox = Box::into_raw(Box::default());
        let shared = Rc::new(Shared { context, worker, inbox });
        let mut worker = Self { shared, fd: -1, address: Vec::new(), ends: BTreeSet::new() };
        worker.prepare()?;
        Ok(worker)
    }

    fn prepare(&mut self) -> Result<(), Refused> {
        let mut handler: ucp_am_handler_param_t = zeroed();
        handler.field_mask = u64::from(
            sys::UCP_AM_HANDLER_PARAM_FIELD_ID
                | sys::UCP_AM_HANDLER_PARAM_FIELD_FLAGS
                | sys::UCP_AM_HANDLER_PARAM_FIELD_CB
                | sys::UCP_AM_HANDLER_PARAM_FIELD_ARG,
        );
        handler.id = AM_ID;
        handler.flags = sys::UCP_AM_FLAG_WHOLE_MSG;
        handler.cb = Some(arrived);
        handler.arg = self.shared.inbox.cast();
        let mut attributes: ucp_worker_attr_t = zeroed();
        attributes.field_mask = u64::from(
            sys::UCP_WORKER_ATTR_FIELD_ADDRESS | sys::UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER,
        );
        // SAFETY: the worker is there; the inbox outlives it; the address that is given is as long
        // as is said, and stays until it is released, after it was copied.
        // JUSTIFICATION: as of `new`.
        unsafe {
            let worker = self.shared.worker;
            ok(sys::ucp_worker_set_am_recv_handler(worker, &raw const handler))?;
            ok(sys::ucp_worker_get_efd(worker, &raw mut self.fd))?;
            ok(sys::ucp_worker_query(worker, &raw mut attributes))?;
            let (start, len) = (attributes.address.cast::<u8>(), attributes.address_length);
            self.address = std::slice::from_raw_parts(start, len).to_vec();
            sys::ucp_worker_release_address(worker, attributes.address);
        }
        if attributes.max_am_header < HEAD_LEN {
            return Err(Refused(sys::UCS_ERR_UNSUPPORTED));
        }
        Ok(())
    }

    /// Readable when there may be something to do, if [`Self::arm`] has said so.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is the worker's, and open as long as that is.
        // JUSTIFICATION: UCX gives a number.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// Where others reach it.
    pub(super) fn address(&self) -> &[u8] {
        &self.address
    }

    /// An endpoint to another host's worker.
    ///
    /// # Errors
    /// UCX's: for example no transport that both have.
    pub(super) fn connect(&mut self, address: &[u8]) -> Result<EndId, Refused> {
        let mut ep = ptr::null_mut();
        let mut params: ucp_ep_params_t = zeroed();
        params.field_mask = u64::from(
            sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        );
        params.address = address.as_ptr().cast::<ucp_address_t>();
        params.err_mode = sys::UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(failed);
        params.err_handler.arg = self.shared.inbox.cast();
        let worker = self.shared.worker;
        // SAFETY: UCX reads the address, which is borrowed; it unpacks what it finds there, of a
        // host that is believed as far as this (ARCHITECTURE.md, "UCX").
        // JUSTIFICATION: as of `new`.
        ok(unsafe { sys::ucp_ep_create(worker, &raw const params, &raw mut ep) })?;
        self.ends.insert(EndId::of(ep));
        Ok(EndId::of(ep))
    }

    /// It is closed, and what is not on its way is lost.
    pub(super) fn close(&mut self, end: EndId) {
        if !self.ends.remove(&end) {
            return;
        }
        let mut params: ucp_request_param_t = zeroed();
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = sys::UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: the endpoint was there until now; a request that is freed before it is done is
        // freed when it is (ucp_request_free).
        // JUSTIFICATION: as of `new`.
        unsafe {
            let request = sys::ucp_ep_close_nbx(end.ep(), &raw const params);
            if !request.is_null() && is_error(request).is_none() {
                sys::ucp_request_free(request);
            }
        }
        self.inbox().said.retain(|it| !matches!(it, Said::Failed(known) if *known == end));
    }

    /// Sends a message for this owner. `true`: it is on its way, and nothing more is said of it.
    ///
    /// # Errors
    /// UCX's: it is lost.
    pub(super) fn send(
        &mut self,
        end: EndId,
        owner: u64,
        head: [u8; HEAD_LEN],
        payload: Vec<u8>,
    ) -> Result<bool, Refused> {
        if !self.ends.contains(&end) {
            return Err(Refused(sys::UCS_ERR_CONNECTION_RESET));
        }
        let pending = Pending { inbox: self.shared.inbox, owner, head, payload };
        let pending = Box::into_raw(Box::new(pending));
        let mut params: ucp_request_param_t = zeroed();
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_CALLBACK
            | sys::UCP_OP_ATTR_FIELD_USER_DATA
            | sys::UCP_OP_ATTR_FIELD_DATATYPE
            | sys::UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = sys::UCP_AM_SEND_FLAG_EAGER;
        params.datatype = BYTES;
        params.cb.send = Some(sent);
        params.user_data = pending.cast();
        // SAFETY: the endpoint is there. Header and payload are in a box that stays where it is
        // until UCX has called back, or has said that it will not.
        // JUSTIFICATION: as of `new`.
        unsafe {
            let (head, payload) = (&raw const (*pending).head, &(*pending).payload);
            let (start, len) = (payload.as_ptr().cast(), payload.len());
            let (head, ep) = (head.cast(), end.ep());
            let params = &raw const params;
            let request = sys::ucp_am_send_nbx(ep, AM_ID, head, HEAD_LEN, start, len, params);
            if request.is_null() {
                drop(Box::from_raw(pending));
                return Ok(true);
            }
            if let Some(status) = is_error(request) {
                drop(Box::from_raw(pending));
                return Err(Refused(status));
            }
        }
        Ok(false)
    }

    /// Lets UCX do what there is to do, once. `false`: there was nothing.
    pub(super) fn progress(&mut self) -> bool {
        // SAFETY: the worker is there; it calls back with what was given to it.
        // JUSTIFICATION: as of `new`.
        unsafe { sys::ucp_worker_progress(self.shared.worker) > 0 }
    }

    /// From now on [`Self::fd`] says when there is something to do. `false`: there is already.
    pub(super) fn arm(&mut self) -> bool {
        // SAFETY: the worker is there.
        // JUSTIFICATION: as of `new`.
        unsafe { sys::ucp_worker_arm(self.shared.worker) == sys::UCS_OK }
    }

    /// UCX's words.
    #[must_use]
    pub(super) fn poll_event(&mut self) -> Option<Event> {
        Some(match self.inbox().said.pop_front()? {
            Said::Arrived(head, bytes) => Event::Arrived(head, Payload::Own(bytes)),
            Said::Held(head, start, len) => {
                let held = Held { shared: Rc::clone(&self.shared), start, len };
                Event::Arrived(head, Payload::Held(held))
            }
            Said::Sent(owner, len) => Event::Sent(owner, len),
            Said::Failed(end) => Event::Failed(end),
        })
    }

    fn inbox(&mut self) -> &mut Inbox {
        // SAFETY: it is there as long as this, and no callback runs now.
        // JUSTIFICATION: callbacks of C need a pointer.
        unsafe { &mut *self.shared.inbox }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        for end in std::mem::take(&mut self.ends) {
            self.ends.insert(end);
            self.close(end);
        }
        while self.poll_event().is_some() {} // what was held is released
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: nothing uses them any more: the worker calls back for what it still had, and then
        // it and the context are gone before the inbox.
        // JUSTIFICATION: as of `Worker::new`.
        unsafe {
            sys::ucp_worker_destroy(self.worker);
            sys::ucp_cleanup(self.context);
            drop(Box::from_raw(self.inbox));
        }
    }
}

/// A message has come. It is copied if it is short, or if UCX does not leave its memory to us.
extern "C" fn arrived(
    inbox: *mut c_void,
    head: *const c_void,
    head_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: UCX gives what it was given, the inbox, which nobody else uses while UCX runs; as
    // many bytes as it says; and a struct that is filled in.
    // JUSTIFICATION: as of `Worker::new`.
    unsafe {
        // A message that would have to be fetched comes from no honest host
        // (UCP_AM_SEND_FLAG_EAGER).
        let has = |flag: u32| (*param).recv_attr & u64::from(flag) != 0;
        let is_there = !has(sys::UCP_AM_RECV_ATTR_FLAG_RNDV);
        if is_there && head_len == HEAD_LEN && (1..=PAYLOAD_MAX).contains(&len) {
            let head = Head::parse(&*head.cast::<[u8; HEAD_LEN]>());
            let said = &mut (*inbox.cast::<Inbox>()).said;
            if len >= HELD_MIN && has(sys::UCP_AM_RECV_ATTR_FLAG_DATA) {
                said.push_back(Said::Held(head, data.cast(), len));
                return sys::UCS_INPROGRESS; // until `ucp_am_data_release`
            }
            let payload = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            said.push_back(Said::Arrived(head, payload));
        }
    }
    sys::UCS_OK
}

/// UCX needs a message's memory no more.
extern "C" fn sent(request: *mut c_void, _: ucs_status_t, pending: *mut c_void) {
    // SAFETY: it is the box of `Worker::send`, and UCX calls once; as of `arrived`. That an
    // endpoint has failed is said besides.
    // JUSTIFICATION: as of `Worker::new`.
    unsafe {
        let pending = Box::from_raw(pending.cast::<Pending>());
        let said = Said::Sent(pending.owner, pending.payload.len());
        (*pending.inbox).said.push_back(said);
        sys::ucp_request_free(request);
    }
}

extern "C" fn failed(inbox: *mut c_void, ep: ucp_ep_h, _: ucs_status_t) {
    // SAFETY: as of `arrived`.
    // JUSTIFICATION: as of `Worker::new`.
    unsafe { (*inbox.cast::<Inbox>()).said.push_back(Said::Failed(EndId::of(ep))) };
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    const HEAD: [u8; HEAD_LEN] = [7; HEAD_LEN];

    /// Payload of the next message that comes to the second of these.
    fn hear(from: &mut Worker, to: &mut Worker) -> Payload {
        loop {
            let moved = from.progress() | to.progress();
            while from.poll_event().is_some() {}
            match to.poll_event() {
                Some(Event::Arrived(head, payload)) => {
                    assert_eq!(head.emit(), HEAD);
                    return payload;
                }
                Some(event) => assert!(matches!(event, Event::Sent(..)), "{event:?}"),
                None if !moved && from.arm() && to.arm() => {
                    let fds = [from.fd(), to.fd()];
                    let mut both = [0, 1].map(|at| PollFd::new(&fds[at], PollFlags::IN));
                    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
                    let ready = poll(&mut both, Some(&limit));
                    assert!(ready.is_ok_and(|ready| ready > 0), "nothing comes");
                }
                None => {}
            }
        }
    }

    /// A worker, another one, and the way from one to the other.
    fn pair() -> (Worker, Worker, EndId) {
        let (mut a, b) = (Worker::new().unwrap(), Worker::new().unwrap());
        let end = a.connect(b.address()).unwrap();
        (a, b, end)
    }

    #[test]
    fn ucx_leaves_a_long_message_where_it_is_until_it_is_dropped() {
        let (mut a, mut b, end) = pair();
        let long: Vec<u8> = (0..PAYLOAD_MAX).map(|at| at.to_le_bytes()[1]).collect();
        let short = long[..HELD_MIN - 1].to_vec();
        let mut held = Vec::new();
        for sent in [&short, &long, &short, &long, &long] {
            a.send(end, 0, HEAD, sent.clone()).unwrap();
            let payload = hear(&mut a, &mut b);
            assert_eq!(payload.bytes(), sent);
            assert_eq!(matches!(payload, Payload::Held(_)), sent.len() == PAYLOAD_MAX);
            held.push(payload);
        }
        drop(held.remove(1));
        // It is there as long as something of it is.
        drop(b);
        drop(a);
        assert_eq!([held[2].bytes(), held[3].bytes()], [&long, &long]);
        assert_eq!(Rc::strong_count(&shared(&held[2]).shared), 2);
    }

    fn shared(payload: &Payload) -> &Held {
        let Payload::Held(held) = payload else { panic!("a copy") };
        held
    }
}
