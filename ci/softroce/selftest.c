/*
 * A reliable connection between the two rxe devices, in one process: 4 KiB by RDMA WRITE.
 *
 *   selftest write      the bytes must arrive, over the wire
 *   selftest wrong-key  a remote key that nobody gave out must end in a remote access error and change nothing
 *   selftest hold       makes queue pairs and waits: for who looks for what programs leave behind
 *   selftest corrupt    as write, but a byte is changed before the comparison: must fail, or the comparison proves nothing
 *
 * Exits with 0 if all is as it must be, else with 1 and a line that says what is not.
 */
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 4096, POISON = 0xff, LIMIT_S = 10 };

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("selftest: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

#define NEED(condition, ...) do { if (!(condition)) fail(__VA_ARGS__); } while (0)

/* One device with a queue pair and a buffer that the peer may write to. */
struct end {
    const char *device;
    union ibv_gid gid;
    int gid_index;
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_cq *completions;
    struct ibv_qp *pair;
    struct ibv_mr *region;
    unsigned char *buffer;
};

/* The table's entry that is the IPv4 address 10.9.0.`last`: rxe has others, of IPv6, that no route serves here. */
static void find_gid(struct end *end, unsigned char last) {
    const unsigned char wanted[16] = {[10] = 0xff, 0xff, 10, 9, 0, last};
    struct ibv_port_attr port;
    NEED(ibv_query_port(end->context, 1, &port) == 0, "%s: no port 1", end->device);
    for (end->gid_index = 0; end->gid_index < port.gid_tbl_len; end->gid_index++) {
        if (ibv_query_gid(end->context, 1, end->gid_index, &end->gid) == 0 && memcmp(end->gid.raw, wanted, 16) == 0)
            return;
    }
    fail("%s has no address 10.9.0.%d", end->device, last);
}

static void open_end(struct end *end, const char *device, unsigned char address) {
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    NEED(list, "no list of devices");
    end->device = device;
    for (int i = 0; i < count; i++) {
        if (strcmp(ibv_get_device_name(list[i]), device) == 0)
            end->context = ibv_open_device(list[i]);
    }
    ibv_free_device_list(list);
    NEED(end->context, "cannot open %s, one of %d devices", device, count);
    find_gid(end, address);

    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    end->buffer = aligned_alloc(4096, BYTES);
    NEED(end->buffer, "no memory");
    memset(end->buffer, POISON, BYTES);
    NEED(end->domain = ibv_alloc_pd(end->context), "%s: no protection domain", device);
    NEED(end->region = ibv_reg_mr(end->domain, end->buffer, BYTES, access), "%s: cannot register memory", device);
    NEED(end->completions = ibv_create_cq(end->context, 16, NULL, NULL, 0), "%s: no completion queue", device);
    struct ibv_qp_init_attr wanted = {.send_cq = end->completions, .recv_cq = end->completions, .qp_type = IBV_QPT_RC,
                                      .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    NEED(end->pair = ibv_create_qp(end->domain, &wanted), "%s: no queue pair", device);
}

static void connect_end(struct end *end, const struct end *peer) {
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    NEED(ibv_modify_qp(end->pair, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
         "%s: cannot go to INIT", end->device);
    struct ibv_qp_attr receive = {
        .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->pair->qp_num, .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12, .ah_attr = {.is_global = 1, .port_num = 1,
                                         .grh = {.dgid = peer->gid, .sgid_index = end->gid_index, .hop_limit = 64}}};
    NEED(ibv_modify_qp(end->pair, &receive, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0,
         "%s: cannot go to RTR", end->device);
    /* Not 7 retries: rxe takes that for "as long as it takes", and nothing here may wait for ever. */
    struct ibv_qp_attr send = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6, .max_rd_atomic = 1};
    NEED(ibv_modify_qp(end->pair, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                             IBV_QP_MAX_QP_RD_ATOMIC) == 0,
         "%s: cannot go to RTS", end->device);
}

static void post_write(struct end *from, const struct end *to, uint32_t remote_key) {
    struct ibv_sge source = {.addr = (uintptr_t)from->buffer, .length = BYTES, .lkey = from->region->lkey};
    struct ibv_send_wr request = {.wr_id = 42, .sg_list = &source, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
                                  .send_flags = IBV_SEND_SIGNALED,
                                  .wr.rdma = {.remote_addr = (uintptr_t)to->buffer, .rkey = remote_key}};
    struct ibv_send_wr *refused;
    NEED(ibv_post_send(from->pair, &request, &refused) == 0, "%s: cannot post a write", from->device);
}

static enum ibv_wc_status completion(struct end *end) {
    struct ibv_wc entry;
    time_t deadline = time(NULL) + LIMIT_S;
    for (;;) {
        int count = ibv_poll_cq(end->completions, 1, &entry);
        NEED(count >= 0, "%s: polling failed with %d", end->device, count);
        if (count == 1)
            break;
        NEED(time(NULL) <= deadline, "%s: no completion in %d s", end->device, LIMIT_S);
    }
    NEED(entry.wr_id == 42, "a completion of request %llu, which was never posted", (unsigned long long)entry.wr_id);
    return entry.status;
}

/* What the interface has sent: the two devices could also meet inside the kernel, and then no test would see a network. */
static long sent_bytes(const char *interface) {
    char path[96];
    long bytes = -1;
    snprintf(path, sizeof path, "/sys/class/net/%s/statistics/tx_bytes", interface);
    FILE *file = fopen(path, "r");
    NEED(file && fscanf(file, "%ld", &bytes) == 1, "cannot read %s", path);
    fclose(file);
    return bytes;
}

static void expect_write(struct end *from, struct end *to, int corrupt) {
    long before = sent_bytes("v0");
    post_write(from, to, to->region->rkey);
    enum ibv_wc_status status = completion(from);
    NEED(status == IBV_WC_SUCCESS, "the write ended with %d (%s)", status, ibv_wc_status_str(status));
    if (corrupt)
        to->buffer[BYTES - 1] ^= 1;
    for (int i = 0; i < BYTES; i++)
        NEED(to->buffer[i] == from->buffer[i], "byte %d is %d, not %d", i, to->buffer[i], from->buffer[i]);
    long sent = sent_bytes("v0") - before;
    NEED(sent > BYTES, "v0 sent %ld bytes, less than the %d written", sent, BYTES);
    printf("write: %d bytes arrived, v0 sent %ld bytes\n", BYTES, sent);
}

static void expect_refusal(struct end *from, struct end *to) {
    post_write(from, to, to->region->rkey ^ 0x5a00);
    enum ibv_wc_status status = completion(from);
    NEED(status == IBV_WC_REM_ACCESS_ERR, "a wrong key ended with %d (%s), not with %d", status, ibv_wc_status_str(status),
         IBV_WC_REM_ACCESS_ERR);
    for (int i = 0; i < BYTES; i++)
        NEED(to->buffer[i] == POISON, "byte %d was written with a wrong key", i);
    printf("wrong-key: refused with %d (%s)\n", status, ibv_wc_status_str(status));
}

int main(int count, char **arguments) {
    const char *mode = count == 2 ? arguments[1] : "";
    struct end left = {0}, right = {0};
    open_end(&left, "rxv0", 1);
    open_end(&right, "rxv1", 2);
    connect_end(&left, &right);
    connect_end(&right, &left);
    for (int i = 0; i < BYTES; i++)
        left.buffer[i] = (unsigned char)(i * 31 + (i >> 8));
    if (strcmp(mode, "write") == 0 || strcmp(mode, "corrupt") == 0)
        expect_write(&left, &right, mode[0] == 'c');
    else if (strcmp(mode, "wrong-key") == 0)
        expect_refusal(&left, &right);
    else if (strcmp(mode, "hold") == 0)
        pause();
    else
        fail("mode \"%s\" is none of write, wrong-key, hold, corrupt", mode);
    return 0;
}
