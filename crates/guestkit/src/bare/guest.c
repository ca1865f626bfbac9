/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A guest without an operating system: it touches its RAM, checks what it reads, and counts.
 *
 * It is started by the PVH protocol (the note below names the entry): 32 bits, flat segments, no paging,
 * no interrupts. It needs nothing of the machine but RAM and a serial port, so it runs under any KVM, also
 * where KVM has no hardware behind it, emulates each instruction, and no stock kernel gets through its
 * boot. There an instruction takes half a microsecond, so those of a touch are few.
 *
 *   RAM   0 ── 1 MiB ─ program, stack ─ versions ── 2 MiB boundary ── pages that it tests ── end of RAM
 *                                       4 bytes a page                hot ones first
 *
 * What a page holds follows from its number and its version:
 *
 *   word 0, 128, 256 ... 896   stamps: odd multiples of (number * NUMBER + 1) * version
 *   the others                 zeros; in one page of 64, noise from a place that follows from the number
 *
 * The version also stands in the table of versions, so a page that comes back with old content is found,
 * as is one of another page or a torn one. The table is RAM like any other: were it old, pages with fresh
 * content would seem wrong. Pages begin in version 1, one of 64 in version 0, in which it is all zeros.
 *
 *   touch   a hot page, chosen at random: two stamps are compared, the first and one of all; of four
 *           pages one is also written: its version is raised
 *   sweep   after each `sweep` touches the next cold page: all its stamps are compared, and its noise;
 *           of four pages one is also written
 *
 * Parameters, on the kernel command line: `hot=N`, hot pages in thousandths (500); `sweep=N`, touches for
 * one page of the sweep, 0 for no sweep (0).
 *
 * Orders are characters on the serial port; what it says is a line each, numbers hexadecimal:
 *
 *   (start)  ready PAGES HOT
 *   c        counted TOUCHED SWEPT TICKS GAP    pages touched and swept, the time stamp counter, and the
 *                                               most ticks that a turn has taken since the last such line
 *   v        sound PAGES                        stamps and noise of all pages were compared
 *   r        resting VERSIONS PAGES             where these are; nothing is touched until the next order
 *   any      wrong PAGE WORD FOUND WANTED VERSION   and nothing is done after that
 */

typedef unsigned int u32;
typedef unsigned long long u64;

#define PAGE_BYTES 4096
#define PAGE_WORDS 1024
#define STAMP_WORDS 128 /* from a stamp to the next */
#define STAMPS 8
#define SECTION_BYTES (2u << 20)
#define NUMBER 0x7feb352eu /* even, so that no two pages have the same stamps */
#define KINDS 64
#define ZERO_KIND 0
#define NOISE_KIND 1
#define NOISE_WORDS (2 * PAGE_WORDS)
/* The firmware has worked near the end of RAM, also below 16 MiB that it may keep for itself there. All
   other RAM is zeros, and to write as many zeros takes an emulated guest a third of a millisecond a page. */
#define FIRMWARE_BYTES (20u << 20)
#define SERIAL 0x3f8
#define LINE_STATUS (SERIAL + 5)
#define RECEIVED 1
#define SENDABLE 0x20
#define START_MAGIC 0x336ec578
#define RAM 1
#define TURN 64 /* touches between two readings of the time stamp counter */
#define LOOK_TICKS (1u << 25) /* between two looks at the port, which leave the guest: some ten milliseconds */

__asm__(".section .note.pvh, \"a\", @note\n"
	"	.align 4\n"
	"	.long 4, 4, 18\n" /* bytes of the name and of the value; XEN_ELFNOTE_PHYS32_ENTRY */
	"	.asciz \"Xen\"\n"
	"	.long start\n"
	".section .text.start, \"ax\", @progbits\n"
	"	.globl start\n"
	"start:\n"
	"	cld\n"
	"	mov $stack + 16384, %esp\n"
	"	push %ebx\n" /* the address of struct start */
	"	call run\n");

char stack[16384] __attribute__((aligned(16)));
extern char end[];

/* Xen's hvm_start_info and hvm_memmap_table_entry, version 1. */
struct start {
	u32 magic, version, flags, modules;
	u64 modules_at, command_line_at, rsdp_at, map_at;
	u32 map_entries, reserved;
};

struct range {
	u64 at, bytes;
	u32 kind, reserved;
};

static volatile u32 *versions, *pages;
static u32 page_count, hot_count;
static u32 noise[NOISE_WORDS];

static void out(u32 port, u32 value)
{
	__asm__ volatile("outb %b0, %w1" : : "a"(value), "d"(port));
}

static u32 in(u32 port)
{
	u32 value = 0;

	__asm__ volatile("inb %w1, %b0" : "+a"(value) : "d"(port));
	return value;
}

static u64 ticks(void)
{
	u64 now;

	__asm__ volatile("rdtsc" : "=A"(now));
	return now;
}

static void say(const char *text)
{
	for (; *text; text++) {
		while (!(in(LINE_STATUS) & SENDABLE))
			;
		out(SERIAL, *text);
	}
}

static void say_number(u64 number)
{
	char digits[18];
	char *at = digits + sizeof digits;

	*--at = 0;
	do {
		*--at = "0123456789abcdef"[number & 15];
		number >>= 4;
	} while (number);
	*--at = ' ';
	say(at);
}

static void stop(void)
{
	for (;;)
		__asm__ volatile("hlt");
}

static void wrong(u32 page, u32 word, u32 found, u32 wanted)
{
	say("wrong");
	say_number(page);
	say_number(word);
	say_number(found);
	say_number(wanted);
	say_number(versions[page]);
	say("\n");
	stop();
}

static volatile u32 *words_of(u32 page)
{
	return pages + page * PAGE_WORDS;
}

static u32 first_stamp(u32 page, u32 version)
{
	return (page * NUMBER + 1) * version;
}

static const u32 *noise_of(u32 page)
{
	return noise + page / KINDS % PAGE_WORDS;
}

static void write_stamps(u32 page, u32 version)
{
	volatile u32 *word = words_of(page);
	u32 stamp = first_stamp(page, version), step = 2 * stamp;
	u32 i;

	for (i = 0; i < STAMPS; i++, word += STAMP_WORDS, stamp += step)
		*word = stamp;
}

static void raise_version(u32 page)
{
	u32 version = versions[page] + 1;

	versions[page] = version;
	write_stamps(page, version);
}

static void fill(u32 page)
{
	u32 kind = page % KINDS, count = PAGE_WORDS;
	volatile u32 *to = words_of(page);

	if (kind == NOISE_KIND) {
		const u32 *from = noise_of(page);

		__asm__ volatile("rep movsl" : "+S"(from), "+D"(to), "+c"(count) : : "memory");
	} else if (page_count - page <= FIRMWARE_BYTES / PAGE_BYTES) {
		__asm__ volatile("rep stosl" : "+D"(to), "+c"(count) : "a"(0) : "memory");
	}
	versions[page] = kind != ZERO_KIND;
	write_stamps(page, kind != ZERO_KIND);
}

static void touch(u32 page, u32 which)
{
	volatile u32 *word = words_of(page);
	u32 stamp = first_stamp(page, versions[page]);

	if (*word != stamp)
		wrong(page, 0, *word, stamp);
	word += which * STAMP_WORDS;
	stamp *= 2 * which + 1;
	if (*word != stamp)
		wrong(page, which * STAMP_WORDS, *word, stamp);
}

/* Compares the words between two stamps with noise. */
static void check_noise(u32 page, u32 which)
{
	u32 at = which * STAMP_WORDS + 1;
	const u32 *wanted = noise_of(page) + at;
	volatile u32 *found = words_of(page) + at;
	u32 count = STAMP_WORDS - 1;
	char same;

	__asm__ volatile("repe cmpsl\n\tsete %3"
			 : "+S"(wanted), "+D"(found), "+c"(count), "=q"(same)
			 :
			 : "memory", "cc");
	if (!same)
		wrong(page, at + STAMP_WORDS - 2 - count, found[-1], wanted[-1]);
}

static void check(u32 page)
{
	volatile u32 *word = words_of(page);
	u32 stamp = first_stamp(page, versions[page]), step = 2 * stamp;
	u32 i;

	for (i = 0; i < STAMPS; i++, word += STAMP_WORDS, stamp += step)
		if (*word != stamp)
			wrong(page, i * STAMP_WORDS, *word, stamp);
	if (page % KINDS == NOISE_KIND)
		for (i = 0; i < STAMPS; i++)
			check_noise(page, i);
}

static void make_noise(void)
{
	u32 word = 0x2545f491, i;

	for (i = 0; i < NOISE_WORDS; i++) {
		word ^= word << 13;
		word ^= word >> 17;
		word ^= word << 5;
		noise[i] = word;
	}
}

/* The number after `name` on the command line. */
static u32 parameter(const char *line, const char *name, u32 otherwise)
{
	for (; *line; line++) {
		const char *at = line, *wanted = name;
		u32 number = 0;

		while (*wanted && *at == *wanted)
			at++, wanted++;
		if (*wanted)
			continue;
		for (; *at >= '0' && *at <= '9'; at++)
			number = number * 10 + (*at - '0');
		return number;
	}
	return otherwise;
}

/* Divides the piece of RAM that the program is in; whether there is enough for what is asked. */
static int divide(const struct start *start, u32 hot_permille)
{
	const struct range *range = (const struct range *)(u32)start->map_at;
	u32 first = ((u32)end + PAGE_BYTES - 1) & -PAGE_BYTES;
	u32 i, left;

	for (i = 0; i < start->map_entries; i++, range++) {
		u64 after = range->at + range->bytes;

		if (range->kind != RAM || range->at > first || after <= first || after >> 32)
			continue;
		versions = (volatile u32 *)first;
		first += ((u32)after - first) / PAGE_BYTES * 4;
		first = (first + SECTION_BYTES - 1) & -SECTION_BYTES;
		left = (u32)after > first ? (u32)after - first : 0;
		pages = (volatile u32 *)first;
		page_count = left / PAGE_BYTES;
		hot_count = page_count * hot_permille / 1000;
		return hot_permille <= 1000 && hot_count > 0;
	}
	return 0;
}

static void obey(u32 order, u64 touched, u64 swept, u64 *gap)
{
	u32 page;

	switch (order) {
	case 'c':
		say("counted");
		say_number(touched);
		say_number(swept);
		say_number(ticks());
		say_number(*gap);
		say("\n");
		*gap = 0;
		break;
	case 'v':
		for (page = 0; page < page_count; page++)
			check(page);
		say("sound");
		say_number(page_count);
		say("\n");
		break;
	case 'r':
		say("resting");
		say_number((u32)versions);
		say_number((u32)pages);
		say("\n");
		while (!(in(LINE_STATUS) & RECEIVED))
			;
		break;
	}
}

static u32 sweep(u32 cold, u32 write)
{
	if (cold >= page_count)
		cold = hot_count;
	check(cold);
	if (write)
		raise_version(cold);
	return cold + 1;
}

static void work(u32 sweep_every)
{
	u64 touched = 0, swept = 0, gap = 0, looked_at_port = 0, looked = ticks(), now;
	u32 random = 1, until_sweep = sweep_every, cold = hot_count, i;

	if (hot_count == page_count)
		until_sweep = 0;
	for (;;) {
		for (i = 0; i < TURN; i++) {
			/* Its high bits choose the page, lower ones the stamp: the lowest repeat soonest. */
			u32 page = (u64)(random = random * 1664525 + 1013904223) * hot_count >> 32;

			touch(page, random >> 8 & (STAMPS - 1));
			if (i % 4 == 0)
				raise_version(page);
			if (until_sweep && --until_sweep == 0) {
				cold = sweep(cold, swept++ % 4 == 0);
				until_sweep = sweep_every;
			}
		}
		touched += TURN;
		now = ticks();
		if (now - looked > gap)
			gap = now - looked;
		looked = now;
		if (now - looked_at_port < LOOK_TICKS)
			continue;
		looked_at_port = now;
		while (in(LINE_STATUS) & RECEIVED) {
			obey(in(SERIAL), touched, swept, &gap);
			looked = ticks();
		}
	}
}

void run(const struct start *start)
{
	const char *line = "";
	u32 page;

	if (start->magic != START_MAGIC || start->version < 1) {
		say("unable: no start information of version 1\n");
		stop();
	}
	if (start->command_line_at)
		line = (const char *)(u32)start->command_line_at;
	if (!divide(start, parameter(line, "hot=", 500))) {
		say("unable: no RAM for what is asked\n");
		stop();
	}
	make_noise();
	for (page = 0; page < page_count; page++)
		fill(page);
	say("ready");
	say_number(page_count);
	say_number(hot_count);
	say("\n");
	work(parameter(line, "sweep=", 0));
}
