/*
 * A guest for tests: no operating system, one processor, one virtio network card that it polls.
 *
 * It does what an agent in a microVM does, as far as a coordinator can tell: it reads its boot data from the metadata
 * service (version 2, with a token; or waits to be copied when it is told so), connects to the coordinator by WebSocket, authenticates, registers, says that it
 * has its configuration, takes one job, sends the job's output, reports its end, and resets the machine, which ends
 * the VMM.  The "commands" of its jobs are a few words of its own (see run_job), most of which try what it can reach.
 *
 * Some processors on which this runs are themselves emulated and get rare instructions wrong: no division here, no
 * floating point, no vector registers.
 */
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define TICKS_PER_MS 2000000ull
#define BARRIER __asm__ volatile("" ::: "memory")

/* ------------------------------------------------------------------ memory and text */

void *memset(void *to, int value, size_t count) {
    u8 *at = to;
    while (count--) *at++ = (u8)value;
    return to;
}

void *memcpy(void *to, const void *from, size_t count) {
    u8 *at = to;
    const u8 *next = from;
    while (count--) *at++ = *next++;
    return to;
}

static size_t length(const char *text) {
    size_t n = 0;
    while (text[n]) n++;
    return n;
}

/* Where `part` begins in `text`, behind it; 0: nowhere. */
static const char *after(const char *text, const char *part) {
    size_t n = length(part);
    for (; text && *text; text++) {
        size_t i = 0;
        while (i < n && text[i] == part[i]) i++;
        if (i == n) return text + n;
    }
    return 0;
}

static int begins(const char *text, const char *with) { return after(text, with) == text + length(with); }

static char *append(char *to, const char *text) {
    while (*text) *to++ = *text++;
    *to = 0;
    return to;
}

static char *append_number(char *to, u32 number) {
    static const u32 powers[] = {1000000000, 100000000, 10000000, 1000000, 100000, 10000, 1000, 100, 10, 1};
    int begun = 0;
    for (int i = 0; i < 10; i++) {
        char digit = '0';
        while (number >= powers[i]) {
            number -= powers[i];
            digit++;
        }
        if (digit != '0' || begun || i == 9) {
            *to++ = digit;
            begun = 1;
        }
    }
    *to = 0;
    return to;
}

static u32 number_at(const char **text) {
    u32 number = 0;
    while (**text >= '0' && **text <= '9') number = number * 10 + (u32)(*(*text)++ - '0');
    return number;
}

static u32 hex_at(const char *text) {
    u32 number = 0;
    for (;; text++) {
        if (*text >= '0' && *text <= '9') number = number * 16 + (u32)(*text - '0');
        else if (*text >= 'a' && *text <= 'f') number = number * 16 + (u32)(*text - 'a' + 10);
        else return number;
    }
}

/* Two digits of either case. */
static u32 mac_byte_at(const char *text) {
    u32 number = 0;
    for (int i = 0; i < 2; i++) {
        char c = text[i];
        number = number * 16 + (u32)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    return number;
}

static u32 address_at(const char **text) {
    u32 address = 0;
    for (int i = 0; i < 4; i++) {
        address = address << 8 | number_at(text);
        if (i < 3) (*text)++;
    }
    return address;
}

static u32 port_at(const char **text) {
    if (**text != ':') return 80;
    (*text)++;
    return number_at(text);
}

/* ------------------------------------------------------------------ the machine */

static void out8(u16 port, u8 value) { __asm__ volatile("outb %0,%1" ::"a"(value), "Nd"(port)); }

static u64 ticks(void) {
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (u64)high << 32 | low;
}

static void print(const char *text) {
    while (*text) out8(0x3f8, (u8)*text++);
}

static void print_line(const char *what, const char *more) {
    print(what);
    print(more);
    print("\n");
}

/* Alive, without using the processor, until somebody ends the machine. */
static void hold(void) {
    for (;;) __asm__ volatile("cli; hlt");
}

static void reset(void) {
    out8(0x64, 0xfe);
    hold();
}

static void give_up(const char *why) {
    print_line("kici-init: cannot go on: ", why);
    reset();
}

/* ------------------------------------------------------------------ the network card */

#define SLOTS 64
#define SLOT_BYTES 2048
#define HEADER 12

struct descriptor { u64 address; u32 bytes; u16 flags, next; };
struct queue {
    struct descriptor table[SLOTS];
    struct { u16 flags, index, ring[SLOTS], event; } offered;
    u8 space[64];
} __attribute__((aligned(4096)));
struct used { u16 flags, index; struct { u32 id, bytes; } ring[SLOTS]; u16 event; } __attribute__((aligned(64)));

static struct queue queues[2];
static struct used used[2];
static u8 received[SLOTS][SLOT_BYTES] __attribute__((aligned(64)));
static u8 outgoing[SLOT_BYTES] __attribute__((aligned(64)));
static u16 received_last, sent_last;
static volatile u32 *card;
static u64 device_pages[512] __attribute__((aligned(4096)));
static u8 my_mac[6];

static u32 card_read(int at) { return card[at / 4]; }
static void card_write(int at, u32 value) { card[at / 4] = value; }

static void queue_up(int which) {
    u64 places[3] = {(u64)&queues[which].table, (u64)&queues[which].offered, (u64)&used[which]};
    card_write(0x30, (u32)which);
    if (card_read(0x34) < SLOTS) give_up("the queue is too short");
    card_write(0x38, SLOTS);
    for (int i = 0; i < 3; i++) {
        card_write(0x80 + 16 * i, (u32)places[i]);
        card_write(0x84 + 16 * i, (u32)(places[i] >> 32));
    }
    card_write(0x44, 1);
}

static void offer(int which, u16 slot) {
    queues[which].offered.ring[queues[which].offered.index % SLOTS] = slot;
    BARRIER;
    queues[which].offered.index++;
    BARRIER;
}

static void card_up(const char *command_line) {
    /* The first GiB is mapped; devices are above it. */
    u64 *directory = (u64 *)0xa000;
    for (u64 i = 0; i < 512; i++) device_pages[i] = (0xc0000000ull + (i << 21)) | 0x83;
    directory[3] = (u64)device_pages | 3;
    BARRIER;
    const char *at = command_line;
    while ((at = after(at, "virtio_mmio.device=4K@0x"))) {
        card = (volatile u32 *)(u64)hex_at(at);
        if (card_read(0) == 0x74726976 && card_read(8) == 1) break;
    }
    if (!at) give_up("there is no network card");
    card_write(0x70, 0);
    card_write(0x70, 1);
    card_write(0x70, 3);
    card_write(0x14, 1);
    if (!(card_read(0x10) & 1)) give_up("the network card is of an old kind");
    card_write(0x14, 0);
    u32 offered = card_read(0x10);
    card_write(0x24, 1);
    card_write(0x20, 1);
    card_write(0x24, 0);
    card_write(0x20, offered & 0x20);
    card_write(0x70, 11);
    if (!(card_read(0x70) & 8)) give_up("the network card refuses us");
    for (int i = 0; i < 6; i++) my_mac[i] = ((volatile u8 *)card)[0x100 + i];
    queue_up(0);
    queue_up(1);
    card_write(0x70, 15);
    for (u16 i = 0; i < SLOTS; i++) {
        queues[0].table[i] = (struct descriptor){(u64)received[i], SLOT_BYTES, 2, 0};
        offer(0, i);
    }
    card_write(0x50, 0);
}

/* Send the frame of this many bytes that stands in `outgoing`.  Not padded: the metadata service wants an ARP request
 * to have exactly its own length. */
static void transmit(int bytes) {
    memset(outgoing, 0, HEADER);
    queues[1].table[0] = (struct descriptor){(u64)outgoing, (u32)(bytes + HEADER), 0, 0};
    offer(1, 0);
    card_write(0x50, 1);
    for (u64 end = ticks() + 2000 * TICKS_PER_MS; ticks() < end;) {
        BARRIER;
        if (((volatile u16 *)&used[1].index)[0] != sent_last) {
            sent_last = used[1].index;
            return;
        }
    }
    give_up("the network card does not send");
}

/* ------------------------------------------------------------------ addresses and packets */

static u32 my_address, gateway, netmask_bits = 24;
static u32 forged;
#define METADATA 0xa9fea9feu
#define NEIGHBOURS 8
static struct { u32 address; u8 mac[6]; } neighbours[NEIGHBOURS];
static int neighbour_count;

static void put16(u8 *at, u32 value) { at[0] = (u8)(value >> 8), at[1] = (u8)value; }
static void put32(u8 *at, u32 value) { put16(at, value >> 16), put16(at + 2, value); }
static u32 get16(const u8 *at) { return (u32)at[0] << 8 | at[1]; }
static u32 get32(const u8 *at) { return get16(at) << 16 | get16(at + 2); }

static u32 sum(const u8 *at, int bytes, u32 start) {
    for (; bytes > 1; bytes -= 2, at += 2) start += get16(at);
    return bytes ? start + ((u32)*at << 8) : start;
}

static u32 folded(u32 value) {
    while (value >> 16) value = (value & 0xffff) + (value >> 16);
    return ~value & 0xffff;
}

static u8 *frame_to(const u8 *mac, u32 kind) {
    u8 *frame = outgoing + HEADER;
    memcpy(frame, mac, 6);
    memcpy(frame + 6, my_mac, 6);
    put16(frame + 12, kind);
    return frame + 14;
}

static void send_arp(u32 operation, const u8 *to, const u8 *their_mac, u32 their_address) {
    u8 *arp = frame_to(to, 0x806);
    put16(arp, 1);
    put16(arp + 2, 0x800);
    arp[4] = 6, arp[5] = 4;
    put16(arp + 6, operation);
    memcpy(arp + 8, my_mac, 6);
    put32(arp + 14, my_address);
    memcpy(arp + 18, their_mac, 6);
    put32(arp + 24, their_address);
    transmit(42);
}

enum { CLOSED, ASKED, OPEN, OVER, REFUSED, FORBIDDEN };
#define INBOX 65536
struct connection {
    u32 address, port, mine;
    u32 sent, seen;
    int state;
    int bytes;
    u8 mac[6];
    char inbox[INBOX];
};
static struct connection coordinator, other;
static struct connection *connections[] = {&coordinator, &other};

enum { FIN = 1, SYN = 2, RST = 4, PSH = 8, ACK = 16 };

static void send_segment(struct connection *c, u32 flags, const char *data, int bytes) {
    u8 *ip = frame_to(c->mac, 0x800);
    memset(ip, 0, 40);
    ip[0] = 0x45;
    put16(ip + 2, (u32)(40 + bytes));
    put16(ip + 4, 1);
    ip[8] = 64, ip[9] = 6;
    put32(ip + 12, forged ? forged : my_address);
    put32(ip + 16, c->address);
    put16(ip + 10, folded(sum(ip, 20, 0)));
    u8 *tcp = ip + 20;
    put16(tcp, c->mine);
    put16(tcp + 2, c->port);
    put32(tcp + 4, c->sent);
    put32(tcp + 8, c->seen);
    tcp[12] = 0x50, tcp[13] = (u8)flags;
    put16(tcp + 14, 8192);
    memcpy(tcp + 20, data, (size_t)bytes);
    put16(tcp + 16, folded(sum(tcp, 20 + bytes, sum(ip + 12, 8, (u32)(6 + 20 + bytes)))));
    transmit(54 + bytes);
    c->sent += (u32)bytes + (flags & (SYN | FIN) ? 1 : 0);
}

static void take_arp(const u8 *arp) {
    u32 from = get32(arp + 14);
    if (get32(arp + 24) != my_address) return;
    if (arp[7] == 1) send_arp(2, arp + 8, arp + 8, from);
    if (arp[7] == 2 && neighbour_count < NEIGHBOURS) {
        neighbours[neighbour_count].address = from;
        memcpy(neighbours[neighbour_count++].mac, arp + 8, 6);
    }
}

static void take_segment(struct connection *c, const u8 *tcp, int bytes) {
    int head = (tcp[12] >> 4) * 4;
    u32 flags = tcp[13], at = get32(tcp + 4);
    int count = bytes - head;
    if (flags & RST) {
        c->state = REFUSED;
    } else if (c->state == ASKED && (flags & (SYN | ACK)) == (SYN | ACK)) {
        c->seen = at + 1;
        c->state = OPEN;
    } else if (c->state == OPEN && at == c->seen) {
        for (int i = 0; i < count && c->bytes < INBOX - 1; i++) c->inbox[c->bytes++] = (char)tcp[head + i];
        c->inbox[c->bytes] = 0;
        c->seen += (u32)count + (flags & FIN ? 1 : 0);
        if (flags & FIN) c->state = OVER;
        if (count || (flags & FIN)) send_segment(c, ACK, "", 0);
    } else if (c->state >= OPEN && count) {
        send_segment(c, ACK, "", 0);
    }
}

static void take_frame(const u8 *frame) {
    u32 kind = get16(frame + 12);
    const u8 *ip = frame + 14;
    if (kind == 0x806) take_arp(ip);
    if (kind != 0x800) return;
    int head = (ip[0] & 15) * 4, bytes = (int)get16(ip + 2) - head;
    const u8 *inside = ip + head;
    if (ip[9] == 1 && inside[0] == 3) { /* somebody on the way says no: the segment is quoted */
        const u8 *quoted = inside + 8;
        const u8 *tcp = quoted + (quoted[0] & 15) * 4;
        for (int i = 0; i < 2; i++)
            if (connections[i]->state == ASKED && connections[i]->mine == get16(tcp)) connections[i]->state = FORBIDDEN;
    }
    if (ip[9] != 6) return;
    for (int i = 0; i < 2; i++) {
        struct connection *c = connections[i];
        if (c->state != CLOSED && c->mine == get16(inside + 2) && c->address == get32(ip + 12))
            take_segment(c, inside, bytes);
    }
}

static int poll_card(void) {
    BARRIER;
    if (((volatile u16 *)&used[0].index)[0] == received_last) return 0;
    u16 slot = (u16)used[0].ring[received_last % SLOTS].id;
    received_last++;
    take_frame(received[slot] + HEADER);
    offer(0, slot);
    card_write(0x50, 0);
    return 1;
}

static const u8 *mac_of(u32 address) {
    for (int i = 0; i < neighbour_count; i++)
        if (neighbours[i].address == address) return neighbours[i].mac;
    return 0;
}

/* Who takes packets to this address on this link; 0: nobody answers. */
static const u8 *next_hop(u32 address) {
    static const u8 everybody[6] = {255, 255, 255, 255, 255, 255}, nobody[6];
    u32 mask = ~0u << (32 - netmask_bits);
    u32 hop = address == METADATA || !((address ^ my_address) & mask) ? address : gateway;
    for (int tries = 0; tries < 10; tries++) {
        if (mac_of(hop)) return mac_of(hop);
        send_arp(1, everybody, nobody, hop);
        for (u64 end = ticks() + 100 * TICKS_PER_MS; ticks() < end && !mac_of(hop);) poll_card();
    }
    return mac_of(hop);
}

static u32 next_port; /* ours, of the connection before */

static int connect_to(struct connection *c, u32 address, u32 port, u64 wait_ms) {
    if (!next_port) next_port = 20000 + (u32)(ticks() & 0x3fff);
    c->state = CLOSED;
    const u8 *mac = next_hop(address);
    if (!mac) return CLOSED;
    memcpy(c->mac, mac, 6);
    c->address = address, c->port = port, c->mine = ++next_port, c->bytes = 0, c->seen = 0;
    c->sent = (u32)ticks();
    c->state = ASKED;
    u64 end = ticks() + wait_ms * TICKS_PER_MS, again = 0;
    while (c->state == ASKED && ticks() < end) {
        if (ticks() > again) {
            send_segment(c, SYN, "", 0);
            c->sent--;
            again = ticks() + 400 * TICKS_PER_MS;
        }
        poll_card();
    }
    if (c->state == OPEN) {
        c->sent++;
        send_segment(c, ACK, "", 0);
    }
    return c->state;
}

static void disconnect(struct connection *c) {
    if (c->state == OPEN || c->state == OVER) send_segment(c, FIN | ACK, "", 0);
    c->state = CLOSED;
}

static void send_bytes(struct connection *c, const char *data, int bytes) {
    while (bytes > 0) {
        int part = bytes > 1400 ? 1400 : bytes;
        send_segment(c, PSH | ACK, data, part);
        data += part;
        bytes -= part;
        while (poll_card()) {}
    }
}

/* ------------------------------------------------------------------ boot data */

static char request[2048], boot_data[INBOX], token[256];

static int http(struct connection *c, const char *text) {
    send_bytes(c, text, (int)length(text));
    for (u64 end = ticks() + 3000 * TICKS_PER_MS; ticks() < end && c->state == OPEN;) {
        poll_card();
        const char *body = after(c->inbox, "\r\n\r\n"), *size = after(c->inbox, "ontent-Length: ");
        if (!size) size = after(c->inbox, "ontent-length: ");
        if (body && size && c->inbox + c->bytes >= body + number_at(&size)) break;
    }
    const char *status = after(c->inbox, "HTTP/1.1 ");
    if (!status) status = after(c->inbox, "HTTP/1.0 ");
    return status ? (int)number_at(&status) : 0;
}

/* Ask the metadata service for everything; its status, 0 for no answer, and the body in boot_data. */
static int read_metadata(void) {
    boot_data[0] = 0;
    if (connect_to(&other, METADATA, 80, 2000) != OPEN) return 0;
    int status = http(&other, "PUT /latest/api/token HTTP/1.1\r\nHost: x\r\n"
                              "X-metadata-token-ttl-seconds: 60\r\nContent-Length: 0\r\n\r\n");
    const char *body = after(other.inbox, "\r\n\r\n");
    if (status == 200 && body && length(body) < sizeof token) {
        append(token, body);
        disconnect(&other);
        if (connect_to(&other, METADATA, 80, 2000) != OPEN) return 0;
        char *at = append(request, "GET /latest/meta-data HTTP/1.1\r\nHost: x\r\nAccept: application/json\r\nX-metadata-token: ");
        append(append(at, token), "\r\n\r\n");
        status = http(&other, request);
        body = after(other.inbox, "\r\n\r\n");
        append(boot_data, body ? body : "");
    }
    disconnect(&other);
    return status;
}

/* A text value of the boot data; empty when it is not there. */
static const char *told(const char *key, char *to, size_t room) {
    char wanted[64];
    append(append(append(wanted, "\""), key), "\":\"");
    const char *at = after(boot_data, wanted);
    size_t n = 0;
    for (; at && *at && *at != '"' && n < room - 1; at++)
        if (*at != '\\') to[n++] = *at;
    to[n] = 0;
    return to;
}

/* ------------------------------------------------------------------ the coordinator */

static char message[16384], output[8192];

static void say(const char *text) {
    static char frame[16400];
    int bytes = (int)length(text), at = 0;
    frame[at++] = (char)0x81;
    if (bytes < 126) {
        frame[at++] = (char)(0x80 | bytes);
    } else {
        frame[at++] = (char)(0x80 | 126);
        put16((u8 *)frame + at, (u32)bytes);
        at += 2;
    }
    memset(frame + at, 0, 4); /* a mask of zeros masks nothing */
    at += 4;
    memcpy(frame + at, text, (size_t)bytes);
    send_bytes(&coordinator, frame, at + bytes);
}

/* The next message of the coordinator in `message`; 0: the connection is over. */
static int hear(u64 wait_ms) {
    struct connection *c = &coordinator;
    u64 end = ticks() + wait_ms * TICKS_PER_MS, beat = ticks() + 10000 * TICKS_PER_MS;
    for (;;) {
        u8 *in = (u8 *)c->inbox;
        int head = 2, bytes = in[1] & 127;
        if (bytes == 126) head = 4, bytes = (int)get16(in + 2);
        if (c->bytes >= 2 && c->bytes >= head + bytes) {
            int kind = in[0] & 15, kept = bytes < (int)sizeof message - 1 ? bytes : (int)sizeof message - 1;
            memcpy(message, in + head, (size_t)kept);
            message[kept] = 0;
            c->bytes -= head + bytes;
            for (int i = 0; i < c->bytes; i++) in[i] = in[i + head + bytes];
            in[c->bytes] = 0;
            if (kind == 1) return 1;
            if (kind == 8) return 0;
            continue;
        }
        if (c->state != OPEN || ticks() > end) return 0;
        if (ticks() > beat) {
            say("{\"type\":\"heartbeat\",\"activeJobs\":0}");
            beat = ticks() + 10000 * TICKS_PER_MS;
        }
        poll_card();
    }
}

static int wait_for(const char *kind, u64 wait_ms) {
    while (hear(wait_ms)) {
        print_line("heard ", message);
        if (after(message, kind)) return 1;
    }
    return 0;
}

static char *base64(char *to, const char *from, int bytes) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < bytes; i += 3) {
        u32 three = (u32)(u8)from[i] << 16;
        if (i + 1 < bytes) three |= (u32)(u8)from[i + 1] << 8;
        if (i + 2 < bytes) three |= (u32)(u8)from[i + 2];
        *to++ = digits[three >> 18];
        *to++ = digits[three >> 12 & 63];
        *to++ = i + 1 < bytes ? digits[three >> 6 & 63] : '=';
        *to++ = i + 2 < bytes ? digits[three & 63] : '=';
    }
    *to = 0;
    return to;
}

static const char *tried(u32 address, u32 port) {
    static const char *const words[] = {"unreachable", "timeout", "open", "open", "refused", "forbidden"};
    int state = connect_to(&other, address, port, 1500);
    disconnect(&other);
    return words[state];
}

/* What a job says goes into `output`; its exit code. */
static int run_job(const char *words) {
    char *to = output;
    *to = 0;
    if (begins(words, "probe")) {
        for (const char *at = after(words, "\",\""); at; at = after(at, "\",\"")) {
            const char *start = at;
            while (*at && *at != '"') *to++ = *at++;
            u32 address = address_at(&start), port = port_at(&start);
            to = append(append(append(to, " "), tried(address, port)), "\n");
        }
        return 0;
    }
    if (begins(words, "metadata")) {
        int status = read_metadata();
        to = append(append_number(append(to, "status "), (u32)status), " ");
        append(append(to, boot_data), "\n");
        return 0;
    }
    if (begins(words, "forge")) { /* forge SOURCE TARGET */
        const char *at = after(words, "\",\""), *target = after(at, "\",\"");
        u32 source = address_at(&at), address = address_at(&target), port = port_at(&target);
        next_hop(address);
        forged = source;
        const char *result = tried(address, port);
        forged = 0;
        append(append(to, result), "\n");
        return 0;
    }
    if (begins(words, "flood"))
        for (int i = 0; i < 200000; i++) print("all work and no play makes the console a long file\n");
    if (begins(words, "hold")) hold();
    if (begins(words, "crash")) reset();
    if (begins(words, "fail")) return 3;
    append(to, "hello from a microVM\n");
    return 0;
}

static void copy_text(char *to, const char *key) {
    const char *at = after(message, key);
    while (at && *at && *at != '"') *to++ = *at++;
    *to = 0;
}

static void do_job(void) {
    static char id[128], text[16384], encoded[12288];
    copy_text(id, "\"jobId\":\"");
    append(append(append(text, "{\"type\":\"job.ack\",\"jobId\":\""), id), "\"}");
    say(text);
    if (!wait_for("\"job.start\"", 20000)) give_up("the job was not started");
    const char *words = after(message, "\"command\":[\"");
    int code = run_job(words ? words : ""), bytes = (int)length(output);
    if (bytes) {
        base64(encoded, output, bytes);
        char *at = append(append(append(text, "{\"type\":\"log.chunk\",\"jobId\":\""), id), "\",\"stream\":1,\"offset\":0,\"data\":\"");
        append(append(at, encoded), "\"}");
        say(text);
    }
    char *at = append(append(append(text, "{\"type\":\"job.status\",\"jobId\":\""), id), "\",\"state\":\"");
    at = append(append(at, code ? "failed" : "success"), "\",\"exitCode\":");
    at = append(append_number(append(append_number(at, (u32)code), ",\"stdoutBytes\":"), (u32)bytes), ",\"stderrBytes\":0}");
    say(text);
    if (!wait_for("\"job.status.ack\"", 20000)) give_up("the end of the job was not acknowledged");
    say("{\"type\":\"agent.leaving\",\"reason\":\"done\"}");
}

static void be_agent(const char *url) {
    static char value[8192], text[16384];
    const char *at = after(url, "://");
    u32 address = address_at(&at), port = port_at(&at);
    if (connect_to(&coordinator, address, port, 20000) != OPEN) give_up("the coordinator cannot be reached");
    send_bytes(&coordinator, request, (int)(append(append(append(request, "GET "), *at ? at : "/ws"),
        " HTTP/1.1\r\nHost: coordinator\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n") - request));
    for (u64 end = ticks() + 5000 * TICKS_PER_MS; !after(coordinator.inbox, "\r\n\r\n");) {
        if (ticks() > end || coordinator.state != OPEN) give_up("the coordinator does not speak WebSocket");
        poll_card();
    }
    if (!after(coordinator.inbox, " 101 ")) give_up("the coordinator refuses the connection");
    int head = (int)(after(coordinator.inbox, "\r\n\r\n") - coordinator.inbox);
    coordinator.bytes -= head;
    for (int i = 0; i < coordinator.bytes; i++) coordinator.inbox[i] = coordinator.inbox[i + head];
    told("kici-agent-token", value, sizeof value);
    if (*value) {
        append(append(append(text, "{\"type\":\"auth.request\",\"token\":\""), value), "\"}");
        say(text);
        if (!wait_for("\"auth.success\"", 10000)) give_up("the token is refused");
    }
    told("kici-agent-id", value, sizeof value);
    char *to = append(append(append(text, "{\"type\":\"agent.register\",\"agentId\":\""), value), "\",\"labels\":[\"");
    told("kici-labels", value, sizeof value);
    for (const char *label = value; *label; label++) {
        char one[2] = {*label, 0};
        to = append(to, *label == ',' ? "\",\"" : one);
    }
    append(to, "\"],\"hostname\":\"guest\",\"cpuCount\":1,\"totalMemoryMb\":64,\"scalerManaged\":true}");
    say(text);
    if (!wait_for("\"register.ack\"", 10000)) give_up("the registration is refused");
    say("{\"type\":\"config.ack\"}");
    print("registered\n");
    if (*told("TG_AFTER", value, sizeof value) == 'h') hold();
    if (!wait_for("\"job.dispatch\"", 60000)) give_up("there is no job");
    do_job();
    for (u64 end = ticks() + 20 * TICKS_PER_MS; ticks() < end;) poll_card();
}

/* Wait to be copied.  Whoever goes on from here is told who it is; everything it knew of the network is somebody else's. */
static void be_copied(void) {
    static char value[512];
    print("kici-init: warm address clock entropy mac\n");
    while (!after(boot_data, "\"kici-entropy\"")) {
        for (u64 end = ticks() + 20 * TICKS_PER_MS; ticks() < end;) poll_card();
        read_metadata(); /* of which the snapshot may have cut off any part */
    }
    const char *at = told("kici-address", value, sizeof value);
    my_address = address_at(&at);
    at = told("kici-gateway", value, sizeof value);
    gateway = address_at(&at);
    netmask_bits = 24;
    at = told("kici-mac", value, sizeof value);
    for (int i = 0; i < 6; i++, at += 3) my_mac[i] = (u8)mac_byte_at(at);
    neighbour_count = 0;
    at = told("kici-entropy", value, 17);
    /* A guest that had this address before may have left connections behind: ours begin at other ports. */
    next_port = 20000 + (mac_byte_at(at) << 6 | mac_byte_at(at + 2) >> 2);
    print_line("renewed with ", at);
}

void guest(const u8 *boot_parameters) {
    static char value[512];
    const char *command_line = (const char *)(u64)*(const u32 *)(boot_parameters + 0x228);
    print("tiny guest boots\n");
    card_up(command_line);
    const char *at = after(command_line, " ip=");
    if (!at) give_up("no ip= on the command line");
    my_address = address_at(&at);
    at += 2;
    if (*at == ':') netmask_bits = 16;
    else gateway = address_at(&at);
    if (read_metadata() != 200) give_up("there is no metadata");
    if (after(boot_data, "\"kici-warm\"")) be_copied();
    told("TG_BOOT", value, sizeof value);
    if (begins(value, "panic")) {
        print("Kernel panic - not syncing: asked for\n");
        reset();
    }
    if (begins(value, "exit")) give_up("asked to exit");
    if (begins(value, "silent")) {
        print("silent\n");
        hold();
    }
    if (begins(told("kici-orchestrator-url", value, sizeof value), "ws")) be_agent(value);
    print("tiny guest ends\n");
    reset();
}

__asm__(
    ".section .text.start,\"ax\"\n"
    ".globl _start\n"
    "_start:\n"
    "  cld\n"
    "  lea stack_top(%rip),%rsp\n"
    "  mov %rsi,%rdi\n"
    "  call guest\n"
    ".bss\n"
    ".balign 16\n"
    "stack: .skip 65536\n"
    "stack_top:\n"
    ".text\n");
