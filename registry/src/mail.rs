//! A mailbox between two threads that keeps the last message about each key.
//!
//! A bounded channel with a place for each key in front of it, so that neither side waits and no
//! key is lost when the other side is slow: a message that is not yet taken is replaced by the
//! next. Each side has a bell (an eventfd); it rings when there are messages and when there is room
//! again.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};

use rustix::event::{EventfdFlags, eventfd};

/// Messages that the channel holds.
const CHANNEL: usize = 1024;

/// An eventfd.
#[derive(Clone, Debug)]
pub struct Bell(Arc<OwnedFd>);

impl Bell {
    /// A bell that has not rung.
    ///
    /// # Errors
    /// The system call's.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)))
    }

    /// Wakes the thread that polls [`Self::fd`].
    pub fn ring(&self) {
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    /// Silences the bell until it rings again.
    pub fn silence(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }

    /// Readable after the bell has rung.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The receiving end.
#[derive(Debug)]
pub struct Inbox<T> {
    channel: Receiver<T>,
    bell: Bell,
    sender: Bell,
    sender_waits: Arc<AtomicBool>,
}

/// The sending end.
#[derive(Debug)]
pub struct Outbox<K, T> {
    channel: SyncSender<T>,
    waiting: BTreeMap<K, T>,
    bell: Bell,
    waits: Arc<AtomicBool>,
}

/// A mailbox whose sender owns the bell `from` and whose receiver owns the bell `to`.
#[must_use]
pub fn mail<K: Ord, T>(from: &Bell, to: &Bell) -> (Outbox<K, T>, Inbox<T>) {
    let (sender, receiver) = sync_channel(CHANNEL);
    let waits = Arc::new(AtomicBool::new(false));
    let sender_waits = Arc::clone(&waits);
    let inbox = Inbox { channel: receiver, bell: to.clone(), sender: from.clone(), sender_waits };
    (Outbox { channel: sender, waiting: BTreeMap::new(), bell: to.clone(), waits }, inbox)
}

impl<T> Inbox<T> {
    /// The next message, if there is one.
    ///
    /// # Errors
    /// The other end has been dropped.
    pub fn take(&self) -> Result<Option<T>, Gone> {
        let first = self.channel.try_recv();
        if first.is_ok() {
            return first.map(Some).map_err(|_| Gone);
        }
        self.bell.silence();
        // A message may have come before the bell was silent.
        let word = match self.channel.try_recv() {
            Ok(word) => Some(word),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => return Err(Gone),
        };
        if word.is_some() {
            self.bell.ring();
        }
        if self.sender_waits.swap(false, Ordering::SeqCst) {
            self.sender.ring();
        }
        Ok(word)
    }
}

/// The other end has been dropped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Gone;

impl<K: Ord + Clone, T> Outbox<K, T> {
    /// Sends `word` as the last message about `key`.
    pub fn post(&mut self, key: K, word: T) {
        self.waiting.insert(key, word);
        self.flush();
    }

    /// Takes back the message about `key` if it has not entered the channel yet.
    pub fn take_back(&mut self, key: &K) -> Option<T> {
        self.waiting.remove(key)
    }

    /// Messages that wait for room in the channel.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Moves waiting messages into the channel while it has room. To be called when the own bell
    /// rings.
    pub fn flush(&mut self) {
        let (mut rang, mut told) = (false, false);
        while let Some((key, word)) = self.waiting.pop_first() {
            match self.channel.try_send(word) {
                Ok(()) => rang = true,
                Err(TrySendError::Disconnected(_)) => self.waiting.clear(),
                Err(TrySendError::Full(word)) => {
                    self.waiting.insert(key, word);
                    // The receiver may have emptied the channel before it could see that we wait.
                    if std::mem::replace(&mut told, true) {
                        break;
                    }
                    self.waits.store(true, Ordering::SeqCst);
                }
            }
        }
        if rang {
            self.bell.ring();
        }
    }
}

/// One end of the mail of two threads that write to each other: `K` are its own subjects, `Out` its
/// own words, `In` those of the other end.
#[derive(Debug)]
pub struct MailEnd<K, Out, In> {
    bell: Bell,
    outbox: Outbox<K, Out>,
    inbox: Inbox<In>,
}

/// Both ends, by the subjects and words of each.
pub type Ends<K, A, L, B> = (MailEnd<K, A, B>, MailEnd<L, B, A>);

/// Both ends of the mail of two threads.
///
/// # Errors
/// The system's.
pub fn both_ends<K: Ord, A, L: Ord, B>() -> io::Result<Ends<K, A, L, B>> {
    let (one, other) = (Bell::new()?, Bell::new()?);
    let (from_one, to_other) = mail(&one, &other);
    let (from_other, to_one) = mail(&other, &one);
    let one = MailEnd { bell: one, outbox: from_one, inbox: to_one };
    Ok((one, MailEnd { bell: other, outbox: from_other, inbox: to_other }))
}

impl<K: Ord + Clone, Out, In> MailEnd<K, Out, In> {
    /// Readable when there is something to [`Self::take`].
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    /// For those who end the other end: they ring it.
    #[must_use]
    pub fn bell(&self) -> Bell {
        self.bell.clone()
    }

    /// Takes the next word, and hands over the words that waited for room.
    ///
    /// # Errors
    /// The other end is gone.
    pub fn take(&mut self) -> Result<Option<In>, Gone> {
        // In this order: one bell says that there are words and that there is room, and looking for
        // words silences it.
        let word = self.inbox.take();
        self.flush();
        word
    }

    /// As [`Outbox::flush`]; [`Self::take`] does it, too.
    pub fn flush(&mut self) {
        self.outbox.flush();
    }

    /// As [`Outbox::post`].
    pub fn post(&mut self, key: K, word: Out) {
        self.outbox.post(key, word);
    }

    /// As [`Outbox::take_back`].
    pub fn take_back(&mut self, key: &K) -> Option<Out> {
        self.outbox.take_back(key)
    }

    /// As [`Outbox::waiting`].
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.outbox.waiting()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn the_last_word_about_each_key_arrives_however_slow_the_other_side_is() {
        let (near, far) = (Bell::new().unwrap(), Bell::new().unwrap());
        let (mut outbox, inbox) = mail(&near, &far);
        let keys = CHANNEL * 3;
        let mut known = vec![0; keys];
        for round in 1..4 {
            (0..keys).for_each(|key| outbox.post(key, (key, round)));
        }
        assert!(outbox.waiting() <= keys);
        while let Some((key, round)) = inbox.take().unwrap() {
            known[key] = known[key].max(round);
            outbox.flush();
        }
        assert_eq!(known, vec![3; keys]);
    }

    #[test]
    fn no_word_is_left_behind_when_both_ends_sleep_until_their_bells_ring() {
        const WORDS: usize = 20_000;
        for round in 0..20 {
            let (mut one, mut other) = both_ends::<usize, usize, (), ()>().unwrap();
            let rings = move |fd: BorrowedFd<'_>| {
                let mut bell = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
                let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
                assert_eq!(
                    poll(&mut bell, Some(&limit)),
                    Ok(1),
                    "round {round}: it sleeps for ever"
                );
            };
            let reader = std::thread::spawn(move || {
                let mut seen = 0;
                while seen < WORDS {
                    rings(other.fd());
                    seen += std::iter::from_fn(|| other.take().unwrap()).take(64).count();
                }
            });
            (0..WORDS).for_each(|word| one.post(word, word));
            while one.waiting() > 0 {
                rings(one.fd());
                assert_ne!(one.take(), Ok(Some(())));
            }
            reader.join().unwrap();
        }
    }

    #[test]
    fn who_waits_for_room_is_told_of_it() {
        let (near, far) = (Bell::new().unwrap(), Bell::new().unwrap());
        let (mut outbox, inbox) = mail(&near, &far);
        (0..=CHANNEL).for_each(|key| outbox.post(key, key));
        let taken = std::iter::from_fn(|| inbox.take().unwrap()).count();
        assert_eq!(taken, CHANNEL);
        let rung = |bell: &Bell| rustix::io::read(bell.fd(), &mut [0; 8]).is_ok();
        assert!(rung(&near) && !rung(&far));
        outbox.flush();
        assert!(rung(&far));
        assert_eq!(inbox.take(), Ok(Some(CHANNEL)));
        drop(outbox);
        assert_eq!(inbox.take(), Err(Gone));
    }
}
