// The programs behind an attached tap; src/lib.rs has the theory. Each is loaded twice, with other
// constants (src/code.rs), and turn.txt has their code.
#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#define SECTION(name) __attribute__((section(name), used))

// The code has these in the place of constants that are known when it is loaded.
#define CONSTANT(type, number)                                                                     \
	({                                                                                         \
		__u64 it;                                                                          \
		asm("%0 = " #number " ll" : "=r"(it));                                             \
		(type)it;                                                                          \
	})
#define MARK CONSTANT(__u32, 0x4e50000000000001)
#define TARGET CONSTANT(__u32, 0x4e50000000000002)
#define FLAGS CONSTANT(__u64, 0x4e50000000000003)
#define AREA CONSTANT(volatile struct area *, 0x4e50000000000004)
#define PLAIN CONSTANT(struct plain *, 0x4e50000000000005)

#define always_inline inline __attribute__((always_inline))
#define HASH_BITS 16

// src/area.rs has the same.
struct area {
	__u64 turned_at;
	__u64 limit_ns;
	__u64 unused[6];
	// A bit for each hash of addresses and ports: TCP segments with it have passed plain, and SYNs.
	__u64 segments[1 << HASH_BITS >> 6];
	__u64 syns[1 << HASH_BITS >> 6];
};

// Of one tap and direction.
struct plain {
	__u64 frames;
	__u64 bytes;
	__u64 unread;
	// All frames pass plain: the daemon wants none for now.
	volatile __u64 all;
};

static __u64 (*ktime_get_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static long (*redirect)(__u32 index, __u64 flags) = (void *)BPF_FUNC_redirect;
static long (*load_bytes)(const void *skb, __u32 at, void *to, __u32 len) =
	(void *)BPF_FUNC_skb_load_bytes;

static always_inline __u32 mix(__u32 hash, __u32 word)
{
	hash = (hash ^ word) * 0x9e3779b1;
	return hash ^ hash >> 15;
}

static always_inline __u32 of_address(__u32 hash, const __u32 *words, int count)
{
	for (int i = 0; i < count; i++)
		hash = mix(hash, words[i]);
	return hash;
}

enum { NO_TCP, SEGMENT, SYN, UNREAD };

#define NET16(number) __builtin_bswap16(number)
#define PROTOCOL_TCP 6
#define PROTOCOL_UDP 17
#define PROTOCOL_ICMP6 58

// Whether the frame is a segment of TCP, and then its hash, the same in both directions.
static always_inline int look(struct __sk_buff *skb, __u32 *hash)
{
	struct {
		__u16 ports[2];
		__u32 numbers[2];
		__u16 flags;
	} __attribute__((packed)) tcp;
	struct {
		__u32 words[3];
		__u32 from[4], to[4];
	} ip;
	__u32 at = 12, from = 0, to = 0;
	__u16 type;
	// The outermost tag is not in the frame, or it is one of two.
	for (int tags = 0; tags < 3; tags++) {
		if (load_bytes(skb, at, &type, sizeof(type)))
			return UNREAD;
		at += sizeof(type);
		if (type != NET16(0x8100) && type != NET16(0x88a8))
			break;
		at += 2;
	}
	if (type == NET16(0x8100) || type == NET16(0x88a8))
		return UNREAD;
	if (type == NET16(0x0800)) {
		if (load_bytes(skb, at, &ip, 20))
			return UNREAD;
		__u8 *bytes = (void *)&ip;
		if (bytes[9] != PROTOCOL_TCP)
			return NO_TCP;
		if ((bytes[6] & 0x3f) || bytes[7])
			return UNREAD; // a fragment
		at += (bytes[0] & 15) * 4;
		if (load_bytes(skb, at, &tcp, sizeof(tcp)))
			return UNREAD;
		from = of_address(tcp.ports[0], &ip.from[0], 1);
		to = of_address(tcp.ports[1], &ip.from[1], 1);
	} else if (type == NET16(0x86dd)) {
		__u8 next[2];
		if (load_bytes(skb, at, &ip.words[1], 40))
			return UNREAD;
		__u8 *bytes = (void *)&ip.words[1];
		at += 40;
		if (bytes[6] == PROTOCOL_UDP || bytes[6] == PROTOCOL_ICMP6)
			return NO_TCP;
		if (bytes[6] != PROTOCOL_TCP) {
			// Behind one header may be what has nothing to do with connections.
			if (load_bytes(skb, at, next, sizeof(next)))
				return UNREAD;
			return next[0] == PROTOCOL_UDP || next[0] == PROTOCOL_ICMP6 ? NO_TCP : UNREAD;
		}
		if (load_bytes(skb, at, &tcp, sizeof(tcp)))
			return UNREAD;
		from = of_address(tcp.ports[0], ip.from, 4);
		to = of_address(tcp.ports[1], ip.to, 4);
	} else {
		return NO_TCP;
	}
	*hash = mix(0, from + to) >> (32 - HASH_BITS);
	return tcp.flags & NET16(0x0002) ? SYN : SEGMENT;
}

// A frame is about to pass plain.
static always_inline void note(struct __sk_buff *skb, struct area *area, struct plain *plain)
{
	__u32 hash = 0;
	int kind = look(skb, &hash);
	__u64 bit = 1ull << (hash & 63);
	__u32 word = hash >> 6 & ((1 << HASH_BITS >> 6) - 1);
	if (kind == UNREAD)
		__sync_fetch_and_add(&plain->unread, 1);
	if (kind == SEGMENT || kind == SYN)
		__sync_fetch_and_or(&area->segments[word], bit);
	if (kind == SYN)
		__sync_fetch_and_or(&area->syns[word], bit);
	__sync_fetch_and_add(&plain->bytes, skb->len);
}

// A frame of the tap goes to the daemon, unless it comes from there or the daemon is away.
SECTION("turn") int turn_frame(struct __sk_buff *skb)
{
	if (skb->mark == MARK) {
		skb->mark = 0;
		return TC_ACT_UNSPEC;
	}
	volatile struct area *area = AREA;
	__u64 now = ktime_get_ns();
	__u64 first = area->turned_at;
	struct plain *plain = PLAIN;
	__u64 all = plain->all;
	if (all || (first && (__s64)(now - first) > (__s64)area->limit_ns)) {
		// A daemon that is back stores 0, then reads count and bits. This adds with a full barrier,
		// then looks again: so either it turns the frame, or the daemon sees that it passed. Another
		// time is that of a frame which was turned since: the daemon was back.
		note(skb, (struct area *)area, plain);
		__u64 before = __sync_fetch_and_add(&plain->frames, 1);
		asm volatile("" ::"r"(before)); // unused, it would be an add without a barrier
		__u64 again = area->turned_at;
		if (all ? plain->all : again == first)
			return TC_ACT_UNSPEC;
		first = again;
	}
	if (!first)
		area->turned_at = now;
	skb->mark = MARK;
	return redirect(TARGET, 0);
}

// At a tap of the daemon: the host itself has nothing to send there.
SECTION("only") int only_turned(struct __sk_buff *skb)
{
	return skb->mark == MARK ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}

// A frame of the daemon goes on as if the tap had received it, or were to send it.
SECTION("back") int give_back(struct __sk_buff *skb)
{
	skb->mark = MARK;
	return redirect(TARGET, FLAGS);
}
