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
#define PLAIN CONSTANT(__u64 *, 0x4e50000000000005)

struct area {
	__u64 turned_at;
	__u64 limit_ns;
};

static __u64 (*ktime_get_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static long (*redirect)(__u32 index, __u64 flags) = (void *)BPF_FUNC_redirect;

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
	if (first && (__s64)(now - first) > (__s64)area->limit_ns) {
		// A daemon that is back stores 0, then reads the count. This adds with a full barrier, then
		// looks again: so either it turns the frame, or the daemon sees that it passed.
		__u64 before = __sync_fetch_and_add(PLAIN, 1);
		asm volatile("" ::"r"(before)); // unused, it would be an add without a barrier
		first = area->turned_at;
		if (first)
			return TC_ACT_UNSPEC;
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
