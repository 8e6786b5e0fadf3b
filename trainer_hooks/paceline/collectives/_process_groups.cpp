/* Kernels on torch's c10d operators, which record every call of every process group.
 *
 * `process_groups.py` does the same in Python, explains why it is done so, and replaces this library
 * where it was not built. Between two kernels of the training the host's caches are cold, and a
 * kernel in Python then takes 50 to 150 us of the training thread; this one takes a few.
 *
 * Nothing here needs the interpreter's lock, except the first call of a process group. The writer
 * of the ring is in another library (writer/_native.c), which passes its addresses to `pl_start`.
 *
 * A call whose tensors are on a GPU is measured by events on the caller's stream, which are queried
 * at step boundaries and never waited for. Its end is found by asking its Work: the future of such a
 * Work is complete as soon as it was launched.
 */
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

/* Values of paceline_wire.ring and paceline_wire.spans; Python compares LAYOUT with its own. */
constexpr uint64_t STATE_DEPTH = 10, STATE_FRAMES = 16, FRAMES = 8, FRAME_WORDS = 4;
constexpr uint64_t STATE_GROUPS = 48, GROUPS = 64, GROUP_WORDS = 4, GROUP_BYTES_SHIFT = 16;
constexpr uint64_t STATE_PEERS = 304, PEERS = 32, PEER_WORDS = 6;
constexpr uint64_t FLAG_ASYNC = 1, FLAG_WAIT = 2, FLAG_DEVICE = 4;
constexpr uint64_t ALL_REDUCE = 16, ALL_GATHER = 17, REDUCE_SCATTER = 18, BROADCAST = 19;
constexpr uint64_t BARRIER = 20, ALL_TO_ALL = 21, REDUCE = 22, GATHER = 23, SCATTER = 24;
constexpr uint64_t SEND = 25, RECV = 26;
constexpr uint64_t LAYOUT[] = {2, STATE_DEPTH, STATE_FRAMES, FRAMES, FRAME_WORDS, STATE_GROUPS,
                               GROUPS, GROUP_WORDS, GROUP_BYTES_SHIFT, STATE_PEERS, PEERS,
                               PEER_WORDS, FLAG_ASYNC, FLAG_WAIT, FLAG_DEVICE, ALL_REDUCE,
                               ALL_GATHER, REDUCE_SCATTER, BROADCAST, BARRIER, ALL_TO_ALL, REDUCE,
                               GATHER, SCATTER, SEND, RECV};

constexpr uint64_t NO_CHUNK = 0xFFFF, NONE_32 = 0xFFFFFFFF, NO_MICROBATCH = 0xFFFFFFFFull << 32;
constexpr uint64_t SOONEST_OTHER_WORK_NS = 1000000;
constexpr size_t CALLS = 4096, ROWS = 8192, ROW_WORDS = 7;
constexpr size_t POLLED_PER_LAUNCH = 4, TIMED = 16384;
constexpr c10::DeviceType GPU = c10::DeviceType::CUDA;

struct Operator {
    const char *name;
    uint64_t op;
    int payload; /* position of the argument whose size is the payload; -1: none */
};
constexpr Operator OPERATORS[] = {
    {"allreduce_", ALL_REDUCE, 0},
    {"allreduce_coalesced_", ALL_REDUCE, 0},
    {"allgather_", ALL_GATHER, 0},
    {"allgather_coalesced_", ALL_GATHER, 0},
    {"_allgather_base_", ALL_GATHER, 0},
    {"allgather_into_tensor_coalesced_", ALL_GATHER, 0},
    {"reduce_scatter_", REDUCE_SCATTER, 1},
    {"_reduce_scatter_base_", REDUCE_SCATTER, 1},
    {"reduce_scatter_tensor_coalesced_", REDUCE_SCATTER, 1},
    {"broadcast_", BROADCAST, 0},
    {"barrier", BARRIER, -1},
    {"monitored_barrier_", BARRIER, -1},
    {"alltoall_", ALL_TO_ALL, 0},
    {"alltoall_base_", ALL_TO_ALL, 0},
    {"reduce_", REDUCE, 0},
    {"gather_", GATHER, 1},
    {"gather_into_tensor_", GATHER, 1},
    {"scatter_", SCATTER, 0},
    {"send", SEND, 0},
    {"recv_", RECV, 0},
    {"recv_any_source_", RECV, 0},
};

/* What Python passes at the start: addresses in the writer, and functions of the writer. */
struct Start {
    uint64_t *state;
    const uint64_t *word2, *chunk, *step, *owner, *transfer;
    uint64_t *transfers_launched;
    void *writer;
    uint64_t (*push)(void *writer, uint64_t op, uint64_t start_ns, uint64_t place, uint64_t seq);
    void (*pop)(void *writer, uint64_t depth);
    void (*write)(void *writer, uint64_t word1, uint64_t word2, uint64_t peer, uint64_t size,
                  uint64_t sequence, uint64_t start_ns, uint64_t duration_ns);
    int (*define)(const char *group_name, uint64_t slot);
};

/* The words of the state page on which one stream of communications is counted. */
struct Channel {
    uint64_t *entered, *left, *entered_ns, *latest;
    uint64_t sequence = 0;

    uint64_t enter(uint64_t operation, uint64_t now)
    {
        *latest = operation; /* before the time, which may be the same word */
        *entered_ns = now;
        __atomic_store_n(entered, ++sequence, __ATOMIC_RELEASE);
        return sequence;
    }
    void leave(uint64_t number)
    {
        if (*left < number)
            __atomic_store_n(left, number, __ATOMIC_RELEASE);
    }
};

struct Group {
    explicit Group(const c10::intrusive_ptr<c10d::ProcessGroup> &group)
        : address(group.get()), alive(group)
    {
    }

    const c10d::ProcessGroup *address;
    c10::weak_intrusive_ptr<c10d::ProcessGroup> alive;
    uint64_t identifier = UINT64_MAX; /* until it is defined */
    Channel channel;
    std::vector<int64_t> ranks; /* global ranks of its members */
};

/* Whether a stream is being captured: its events would belong to the graph, and a query would end
 * the capture. Torch's interface of devices tells it since 2.13; before, CUDA is asked, whose
 * functions are found in torch's library, because this one is built without CUDA. */
struct Capture {
    void *(*stream_of)(const c10::Stream *) = nullptr; /* c10::cuda::CUDAStream::stream() */
    int (*ask)(void *stream, int *status) = nullptr;

    Capture()
    {
        void *library = dlopen("libc10_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
        if (library == nullptr)
            return;
        stream_of = (decltype(stream_of))dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv");
        ask = (decltype(ask))dlsym(library, "cudaStreamIsCapturing");
    }

    template <typename Guard> static constexpr bool is_told()
    {
        return requires(const Guard &guard, const c10::Stream &stream) {
            guard.isStreamCapturing(stream);
        };
    }

    template <typename Guard> bool is_known() const
    {
        return is_told<Guard>() || (stream_of != nullptr && ask != nullptr);
    }

    template <typename Guard> bool is_capturing(const Guard &guard, const c10::Stream &stream) const
    {
        if constexpr (is_told<Guard>())
            return guard.isStreamCapturing(stream);
        int status = 0;
        return ask(stream_of(&stream), &status) != 0 || status != 0;
    }
};

/* Events of one GPU. Not thread-safe: the recorder's lock protects it. */
class Timer {
    using Guard = c10::impl::DeviceGuardImplInterface;

  public:
    /* Whether this torch can measure on a GPU. */
    static bool is_possible()
    {
        return c10::impl::hasDeviceGuardImpl(GPU) && Capture().is_known<Guard>();
    }

    /* Use this device, unless one is in use already. */
    void use(c10::DeviceIndex device)
    {
        if (guard != nullptr || failed || !is_possible())
            return;
        guard = c10::impl::getDeviceGuardImpl(GPU);
        index = device;
    }

    /* Map device time to the host's clock with an event whose host time is known. */
    void set_anchor(void *event, int device, uint64_t host_ns)
    {
        use((c10::DeviceIndex)device);
        index = (c10::DeviceIndex)device;
        anchor = event;
        anchor_ns = host_ns;
    }

    bool measures(const at::Tensor &tensor) const
    {
        return guard != nullptr && anchor != nullptr && tensor.is_cuda() &&
               tensor.device().index() == index;
    }

    /* Record an event on the caller's stream; null without a device, or during a capture. */
    void *mark()
    {
        if (guard == nullptr)
            return nullptr;
        try {
            const c10::Stream stream = guard->getStream(c10::Device(GPU, index));
            if (capture.is_capturing(*guard, stream))
                return nullptr;
            void *event = nullptr;
            if (!events.empty()) {
                event = events.back();
                events.pop_back();
            }
            guard->record(&event, stream, index, c10::EventFlag::BACKEND_DEFAULT);
            return event;
        } catch (const std::exception &) {
            fail();
            return nullptr;
        }
    }

    void give_back(void *event)
    {
        if (event != nullptr)
            events.push_back(event);
    }

    bool is_capturing() const
    {
        return guard != nullptr &&
               capture.is_capturing(*guard, guard->getStream(c10::Device(GPU, index)));
    }

    /* Whether the device has passed an event. Not during a capture. */
    bool is_over(void *event)
    {
        try {
            return guard != nullptr && guard->queryEvent(event);
        } catch (const std::exception &) {
            fail();
            return false;
        }
    }

    bool times(void *begun, void *ended, uint64_t &start_ns, uint64_t &duration_ns)
    {
        try {
            const double since = guard->elapsedTime(anchor, begun, index) * 1e6;
            start_ns = (uint64_t)((int64_t)anchor_ns + (int64_t)since);
            duration_ns = (uint64_t)std::max(0.0, guard->elapsedTime(begun, ended, index) * 1e6);
            return true;
        } catch (const std::exception &) {
            fail();
            return false;
        }
    }

  private:
    /* After an error of the device, all later calls would fail too. */
    void fail()
    {
        failed = true;
        guard = nullptr;
    }

    const Guard *guard = nullptr;
    Capture capture;
    c10::DeviceIndex index = 0;
    bool failed = false;
    void *anchor = nullptr;
    uint64_t anchor_ns = 0;
    std::vector<void *> events;
};

enum class Phase : uint8_t { FREE, LAUNCHING, IN_FLIGHT, DONE };
enum class Waits : uint8_t { LATER, AT_ONCE, UNKNOWN };

struct Call {
    Phase phase = Phase::FREE;
    Waits waits = Waits::UNKNOWN;
    bool awaited = false, owns = false, in_action = false, failed = false;
    bool polled = false;    /* its tensors are on a GPU */
    bool on_device = false; /* and it is measured there */
    bool taken = false;     /* by an action, which records it */
    void *begun = nullptr, *wait_begun = nullptr; /* events */
    int next = -1;                                /* in its batch: they share a Work */
    uint32_t generation = 0;
    int task = -1; /* the backward pass that launched it */
    uint64_t op, group, peer, size, sequence, word2, chunk;
    uint64_t started, launched, ended, wait_started, depth;
    bool has_frame = false;
    Channel *channel = nullptr;
    void *work = nullptr;
    const void *output = nullptr;
    c10::intrusive_ptr<c10d::Work> kept; /* of a transfer, which has no future, or if polled */
    c10::intrusive_ptr<c10::ivalue::Future> future;
};

uint64_t now_ns()
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

class Recorder {
  public:
    explicit Recorder(const Start &start) : s(start), calls(CALLS), rows(ROWS * ROW_WORDS)
    {
        for (size_t i = CALLS; i-- > 0;)
            free_calls.push_back((int)i);
        groups.reserve(1024); /* calls hold addresses of their channels */
        peers.reserve(1024);
        scratch.resize(8);
    }

    bool owns() const { return (uint64_t)pthread_self() == *s.owner; }

    /* Launch */

    /* `payload`, `result`: a tensor of each. */
    int begin(uint64_t op, uint64_t size, const c10::intrusive_ptr<c10d::ProcessGroup> &group_of,
              int64_t peer_in_group, bool is_transfer, Waits waits, const at::Tensor *payload,
              const at::Tensor *result)
    {
        const int slot = find_group(group_of);
        if (slot < 0)
            return -1;
        Locked locked(*this);
        Group &group = groups[slot];
        if (free_calls.empty()) {
            lost++;
            return -1;
        }
        const int index = free_calls.back();
        free_calls.pop_back();
        Call &call = calls[index];
        const uint32_t generation = call.generation + 1;
        call = Call();
        call.generation = generation;
        call.phase = Phase::LAUNCHING;
        call.waits = waits;
        call.owns = owns();
        const at::Tensor *on_gpu = payload != nullptr && payload->is_cuda() ? payload : result;
        call.polled = on_gpu != nullptr && on_gpu->is_cuda();
        if (call.polled)
            timer.use(on_gpu->device().index());
        call.on_device = payload != nullptr && timer.measures(*payload);
        if (call.on_device)
            call.begun = timer.mark();
        call.op = op;
        call.group = group.identifier;
        call.size = size;
        call.peer = NONE_32;
        call.word2 = call.owns ? *s.word2 : (*s.step | NO_MICROBATCH);
        call.chunk = call.owns ? *s.chunk : NO_CHUNK;
        call.channel = &group.channel;
        if (is_transfer) {
            if (peer_in_group >= 0 && (size_t)peer_in_group < group.ranks.size())
                call.peer = (uint64_t)group.ranks[peer_in_group];
            call.channel = peer_channel(call.peer, op == RECV);
            const uint64_t transfer = call.owns ? *s.transfer : 0;
            if (transfer && ((transfer >> 16) & 1) == (op == RECV)) {
                call.in_action = true;
                call.op = transfer & 0xFFFF;
            }
        }
        call.started = now_ns();
        call.sequence = call.channel->enter(call.op | size << GROUP_BYTES_SHIFT, call.started);
        if (call.polled || (waits == Waits::UNKNOWN && !is_transfer))
            show(call, call.started); /* it may block in its launch */
        return index;
    }

    void abandon(int index)
    {
        Locked locked(*this);
        hide(calls[index]);
        release(index);
    }

    void launched(int index, const c10::intrusive_ptr<c10d::Work> &work, const void *output,
                  bool is_transfer)
    {
        uint32_t generation;
        const int task = torch::autograd::get_current_graph_task_id();
        bool watches = false, call_watches;
        {
            Locked locked(*this);
            Call &call = calls[index];
            hide(call);
            call.launched = now_ns();
            if (!work && batch_of == this) { /* `batch_end` has the Work */
                if (call.in_action)
                    ++*s.transfers_launched;
                call.phase = Phase::IN_FLIGHT;
                batch.push_back(index);
                return;
            }
            if (!work) { /* it blocked, as a monitored barrier does, or is a part of the stream */
                call.channel->leave(call.sequence);
                const uint64_t flag = call.owns || call.on_device ? 0 : FLAG_ASYNC;
                if (call.on_device)
                    emit_timed(call, flag, call.started, call.launched, call.begun, timer.mark());
                else
                    emit(call, flag, call.started, call.launched);
                call.begun = nullptr;
                release(index);
                return;
            }
            if (call.in_action)
                ++*s.transfers_launched;
            call.phase = Phase::IN_FLIGHT;
            call.task = task;
            call.output = output;
            call.work = work.get();
            generation = call.generation;
            /* The end of a call that is waited for at once is that of its wait. */
            call_watches = !is_transfer && !call.polled && call.waits != Waits::AT_ONCE;
            if (is_transfer || call.polled)
                call.kept = work;
            if (call.polled)
                poll(POLLED_PER_LAUNCH);
            add(index);
            latest = index;
            latest_generation = generation;
            if (task >= 0 && task != watched_task) {
                watched_task = task;
                watches = true;
            }
        }
        if (call_watches)
            watch_completion(index, generation, work);
        if (watches) {
            auto self = shared.lock();
            torch::autograd::Engine::get_default_engine().queue_callback(
                [self, task] { self->at_backward_end(task); });
        }
    }

    /* Calls of this thread until `batch_end` share one Work. */
    void batch_begin()
    {
        Locked locked(*this);
        if (batch_of == this) /* an exception has ended the last one */
            for (const int index : batch)
                release(index);
        batch_of = this;
        batch.clear();
    }

    void batch_end(const c10::intrusive_ptr<c10d::Work> &work)
    {
        Locked locked(*this);
        if (batch_of != this)
            return;
        batch_of = nullptr;
        if (batch.empty())
            return;
        for (size_t i = 0; i < batch.size(); i++)
            calls[batch[i]].next = i + 1 < batch.size() ? batch[i + 1] : -1;
        const int leader = batch[0];
        batch.clear();
        if (!work) {
            end_all_unwaited(leader);
            return;
        }
        Call &call = calls[leader];
        call.kept = work;
        call.polled = true;
        call.work = work.get();
        add(leader);
    }

    /* Completion: on the backend's thread */

    void complete(int index, uint32_t generation, bool failed)
    {
        const uint64_t now = now_ns();
        Locked locked(*this);
        Call &call = calls[index];
        if (call.generation != generation || call.phase != Phase::IN_FLIGHT)
            return;
        call.phase = Phase::DONE;
        call.ended = now;
        call.failed = failed;
        if (failed) {
            if (!call.awaited)
                forget(index);
            return; /* the state page keeps showing it as entered */
        }
        call.channel->leave(call.sequence);
        if (!call.awaited && call.waits == Waits::LATER) {
            emit(call, FLAG_ASYNC, call.started, now);
            forget(index);
        }
    }

    /* Waits */

    int64_t wait_begin(int index)
    {
        Call &call = calls[index];
        const uint64_t now = now_ns();
        const bool is_latest = latest == index && latest_generation == call.generation;
        latest = -1;
        if (call.waits == Waits::UNKNOWN)
            call.waits = is_latest && now - call.launched < SOONEST_OTHER_WORK_NS ? Waits::AT_ONCE
                                                                                  : Waits::LATER;
        const bool completed =
            call.polled && call.waits != Waits::AT_ONCE && !timer.is_capturing() && is_over(call);
        for (int each = index; each >= 0; each = calls[each].next) {
            Call &member = calls[each];
            if (member.awaited)
                hide(member); /* by the end of the backward pass: this wait is inside it */
            member.awaited = true;
            timer.give_back(member.wait_begun);
            member.wait_begun = nullptr;
            member.wait_started = completed ? 0 : now; /* 0: there is no wait */
            if (completed)
                continue;
            if (member.on_device && call.waits != Waits::AT_ONCE)
                member.wait_begun = timer.mark();
            show(member, now);
        }
        return index;
    }

    int64_t wait_begin_for(void *work)
    {
        Locked locked(*this);
        const int index = find_work(work);
        return index < 0 ? -1 : wait_begin(index);
    }

    int64_t wait_begin_for_output(const void *output)
    {
        Locked locked(*this);
        if (output == nullptr)
            return -1;
        for (const InFlight &each : in_flight)
            if (calls[each.index].output == output && !calls[each.index].awaited)
                return wait_begin(each.index);
        return -1;
    }

    /* Whether Python must end this wait: its action takes the call over, or its sender is unknown.
     */
    bool needs_python(int index)
    {
        Locked locked(*this);
        for (int each = index; each >= 0; each = calls[each].next) {
            const Call &call = calls[each];
            if (call.in_action || (call.op == RECV && call.peer == NONE_32))
                return true;
        }
        return false;
    }

    void take(int index)
    {
        Locked locked(*this);
        calls[index].taken = true;
    }

    void set_source(int index, uint64_t rank)
    {
        Locked locked(*this);
        Call &call = calls[index];
        call.peer = rank;
        call.channel = peer_channel(rank, true);
        call.sequence = call.channel->enter(call.op | call.size << GROUP_BYTES_SHIFT, call.started);
    }

    void describe(int index, uint64_t *out)
    {
        Locked locked(*this);
        const Call &call = calls[index];
        const uint64_t values[] = {call.in_action, call.peer,    call.size,
                                   call.sequence,  call.started, (uint64_t)(int64_t)call.next};
        std::copy(std::begin(values), std::end(values), out);
    }

    void wait_end(int index, bool succeeded)
    {
        Locked locked(*this);
        end_wait(index, succeeded, now_ns());
    }

    /* The end of a backward pass: where C++ waits, as the reducer of DistributedDataParallel does */

    void at_backward_end(int task)
    {
        auto self = shared.lock();
        {
            Locked locked(*this);
            poll(CALLS);
            int newest = -1;
            for (const InFlight &each : in_flight) {
                const Call &call = calls[each.index];
                if (call.task == task && call.phase == Phase::IN_FLIGHT && !call.awaited &&
                    (newest < 0 || call.started > calls[newest].started))
                    newest = each.index;
            }
            if (newest < 0 || !self)
                return;
            wait_begin(newest);
            calls[newest].waits = Waits::LATER;
            awaited_index = newest;
            awaited_generation = calls[newest].generation;
        }
        torch::autograd::Engine::get_default_engine().queue_callback(
            [self] { self->after_backward_end(); });
    }

    void after_backward_end()
    {
        Locked locked(*this);
        const int index = awaited_index;
        awaited_index = -1;
        if (index < 0 || calls[index].generation != awaited_generation || !calls[index].awaited)
            return;
        if (calls[index].polled) {
            end_backward(calls[index].task, index);
            return;
        }
        Call &call = calls[index];
        if (call.phase != Phase::DONE && call.future && call.future->completed()) {
            /* Waiters are notified before callbacks run. */
            call.phase = Phase::DONE;
            call.ended = now_ns();
            call.failed = call.future->hasError();
        }
        if (call.phase == Phase::DONE) {
            end_wait(index, !call.failed, call.ended);
        } else { /* someone else waits for it later */
            hide(call);
            call.awaited = false;
        }
    }

    /* The writer's side */

    /* Move recorded rows to `out`; called by the owner at each step boundary. */
    size_t take_rows(uint64_t *out, size_t most)
    {
        Locked locked(*this);
        if (!in_flight.empty()) {
            poll(CALLS);
            sweep();
        }
        if (!timed.empty())
            resolve();
        const size_t count = std::min(most, row_count);
        std::copy(rows.begin(), rows.begin() + count * ROW_WORDS, out);
        std::move(rows.begin() + count * ROW_WORDS, rows.begin() + row_count * ROW_WORDS,
                  rows.begin());
        row_count -= count;
        return count;
    }

    void set_anchor(void *event, int device, uint64_t host_ns)
    {
        Locked locked(*this);
        timer.set_anchor(event, device, host_ns);
    }

    void set_group(uint64_t slot, uint64_t identifier, const int64_t *ranks, size_t count)
    {
        Group &group = groups[slot];
        group.identifier = identifier;
        group.ranks.assign(ranks, ranks + count);
        uint64_t *words = identifier < GROUPS ? s.state + STATE_GROUPS + identifier * GROUP_WORDS
                                              : scratch.data();
        group.channel = {words, words + 1, words + 2, words + 3, group.channel.sequence};
    }

    std::weak_ptr<Recorder> shared;
    std::atomic<uint64_t> lost{0};

  private:
    /* Holds the lock. What was discarded meanwhile is deleted after it is released: deleting a
     * tensor may need the interpreter's lock, whose holder may wait for this one. */
    struct InFlight {
        const void *work;
        int index;
    };

    struct Locked {
        explicit Locked(Recorder &recorder) : recorder(recorder) { recorder.mutex.lock(); }
        ~Locked()
        {
            std::vector<c10::intrusive_ptr<c10::intrusive_ptr_target>> garbage;
            garbage.swap(recorder.discarded);
            recorder.mutex.unlock();
        }
        Recorder &recorder;
    };

    int find_group(const c10::intrusive_ptr<c10d::ProcessGroup> &group)
    {
        size_t added;
        {
            Locked locked(*this);
            for (size_t slot = 0; slot < groups.size(); slot++)
                if (groups[slot].address == group.get() && !groups[slot].alive.expired())
                    return groups[slot].identifier == UINT64_MAX ? -1 : (int)slot;
            if (groups.size() == groups.capacity())
                return -1;
            added = groups.size();
            groups.emplace_back(group);
        }
        return s.define(group->getGroupName().c_str(), added) == 0 ? (int)added : -1;
    }

    Channel *peer_channel(uint64_t rank, bool receives)
    {
        const uint64_t key = rank * 2 + receives;
        const auto known = peers.find(key);
        if (known != peers.end())
            return &known->second;
        Channel &channel = peers[key];
        uint64_t slot = 0;
        const auto place = peer_slots.find(rank);
        if (place != peer_slots.end()) {
            slot = place->second;
        } else if (rank != NONE_32) {
            slot = peer_slots.size();
            peer_slots.emplace(rank, slot);
        }
        if (rank == NONE_32 || slot >= PEERS) {
            channel = {&scratch[4], &scratch[5], &scratch[6], &scratch[7]};
            return &channel;
        }
        uint64_t *words = s.state + STATE_PEERS + slot * PEER_WORDS;
        words[0] = rank + 1;
        uint64_t *entered = words + (receives ? 3 : 1);
        channel = {entered, entered + 1, words + 5, words + 5};
        return &channel;
    }

    /* Show on the state page that the owner is in this call. */
    void show(Call &call, uint64_t now)
    {
        if (!owns())
            return;
        const uint64_t place = call.group << 32 | call.peer;
        const uint64_t depth = s.state[STATE_DEPTH];
        if (call.in_action && depth > 0 && depth <= FRAMES) {
            uint64_t *frame = s.state + STATE_FRAMES + (depth - 1) * FRAME_WORDS;
            if (frame[0] == call.op && frame[1] <= call.started) { /* its action is still open */
                frame[2] = place;
                frame[3] = call.sequence;
                return;
            }
        }
        call.depth = s.push(s.writer, call.op, now, place, call.sequence);
        call.has_frame = true;
    }

    void hide(Call &call)
    {
        if (call.has_frame)
            s.pop(s.writer, call.depth);
        call.has_frame = false;
    }

    void watch_completion(int index, uint32_t generation,
                          const c10::intrusive_ptr<c10d::Work> &work)
    {
        try {
            auto future = work->getFuture();
            if (!future)
                return;
            {
                Locked locked(*this);
                if (calls[index].generation == generation)
                    calls[index].future = future;
            }
            std::weak_ptr<Recorder> weak = shared;
            future->addCallback(
                [weak, index, generation](c10::ivalue::Future &ended) {
                    if (auto self = weak.lock())
                        self->complete(index, generation, ended.hasError());
                },
                /*uses_future=*/false);
        } catch (const std::exception &) {
            lost++; /* this backend's Work has no future: its end is that of the wait */
        }
    }

    /* Whether the Work of a polled call is complete. Not during a capture. */
    static bool is_over(const Call &call)
    {
        try {
            return call.kept && call.kept->isCompleted();
        } catch (const std::exception &) {
            return false;
        }
    }

    /* Record the completed ones among the oldest calls that are polled. */
    void poll(size_t most)
    {
        bool asked = false;
        for (; most > 0; most--) {
            int oldest = -1;
            for (const InFlight &each : in_flight) {
                const Call &call = calls[each.index];
                if (call.polled && !call.awaited &&
                    (oldest < 0 || call.started < calls[oldest].started))
                    oldest = each.index;
            }
            if (oldest < 0 || (!asked && timer.is_capturing()) || !is_over(calls[oldest]))
                return;
            asked = true;
            if (calls[oldest].kept->exception())
                calls[oldest].failed = true;
            remove(oldest);
            end_all_unwaited(oldest);
        }
    }

    /* Record the calls that a backward pass launched, and the wait for the newest at its end. */
    void end_backward(int task, int newest)
    {
        std::vector<int> launched;
        for (const InFlight &each : in_flight) {
            const Call &call = calls[each.index];
            if (call.polled && call.task == task && (!call.awaited || each.index == newest))
                launched.push_back(each.index);
        }
        const uint64_t now = now_ns();
        void *ended = nullptr; /* the same for all */
        size_t users = 0;
        for (const int index : launched) {
            Call &call = calls[index];
            hide(call);
            call.channel->leave(call.sequence);
            if (call.on_device && ended == nullptr)
                ended = timer.mark();
            users += emit_timed(call, FLAG_ASYNC, call.started, now, call.begun, ended, false);
            call.begun = nullptr;
            if (index == newest && call.wait_started != 0) {
                users += emit_timed(call, FLAG_WAIT, call.wait_started, now, call.wait_begun, ended,
                                    false);
                call.wait_begun = nullptr;
            }
            forget(index);
        }
        if (users == 0)
            timer.give_back(ended);
        else
            timed.back().owns_ended = true;
    }

    void end_wait(int index, bool succeeded, uint64_t now)
    {
        const bool at_once = calls[index].waits == Waits::AT_ONCE;
        remove(index);
        for (int next; index >= 0; index = next) {
            Call &call = calls[index];
            next = call.next;
            hide(call);
            if (succeeded)
                call.channel->leave(call.sequence);
            if (succeeded && !call.taken)
                emit_waited(call, at_once, now);
            release(index);
        }
    }

    void emit_waited(Call &call, bool at_once, uint64_t now)
    {
        if (call.on_device) {
            emit_timed(call, at_once ? 0 : FLAG_ASYNC, call.started, now, call.begun, timer.mark());
            call.begun = nullptr;
            if (!at_once && call.wait_started != 0) {
                emit_timed(call, FLAG_WAIT, call.wait_started, now, call.wait_begun, timer.mark());
                call.wait_begun = nullptr;
            }
        } else if (at_once && call.owns) {
            emit(call, 0, call.started, now);
        } else {
            const bool done = call.phase == Phase::DONE;
            emit(call, FLAG_ASYNC, call.started, done ? call.ended : now);
            if (owns() && call.wait_started != 0 && (!done || call.ended > call.wait_started))
                emit(call, FLAG_WAIT, call.wait_started, now);
        }
    }

    void end_all_unwaited(int index)
    {
        const bool failed = calls[index].failed;
        for (int next; index >= 0; index = next) {
            next = calls[index].next;
            calls[index].failed = failed;
            end_unwaited(index);
        }
    }

    /* Record a call that nobody waits for. */
    void end_unwaited(int index)
    {
        Call &call = calls[index];
        if (!call.failed) {
            call.channel->leave(call.sequence);
            emit(call, FLAG_ASYNC, call.started,
                 call.phase == Phase::DONE ? call.ended : now_ns());
        }
        release(index);
    }

    /* Record what has completed or been dropped without the wait that was expected. */
    void sweep()
    {
        for (size_t i = in_flight.size(); i-- > 0;) {
            const int index = in_flight[i].index;
            const Call &call = calls[index];
            const bool dropped = !call.polled && call.kept && call.kept.use_count() == 1;
            if (!call.awaited && (call.phase == Phase::DONE || dropped)) {
                remove(index);
                end_unwaited(index);
            }
        }
    }

    /* Record a span between two events, once the device has passed both; between times of the host
     * if one of them is missing. Takes the first, and the second if `owns_ended`. Returns whether the
     * events are used. */
    bool emit_timed(const Call &call, uint64_t flag, uint64_t start, uint64_t end, void *begun,
                    void *ended, bool owns_ended = true)
    {
        if (begun != nullptr && ended != nullptr && timed.size() < TIMED) {
            timed.push_back({word1_of(call, flag | FLAG_DEVICE), call.word2, call.peer, call.size,
                             call.sequence, begun, ended, owns_ended});
            return true;
        }
        timer.give_back(begun);
        if (owns_ended)
            timer.give_back(ended);
        emit(call, flag, start, end);
        return false;
    }

    /* Turn spans that the device has passed into rows. */
    void resolve()
    {
        if (timer.is_capturing())
            return;
        while (!timed.empty() && row_count < ROWS) {
            const Timed &span = timed.front();
            if (!timer.is_over(span.ended))
                return;
            uint64_t start = 0, duration = 0;
            if (timer.times(span.begun, span.ended, start, duration)) {
                const uint64_t row[] = {span.word1,    span.word2, span.peer, span.size,
                                        span.sequence, start,      duration};
                std::copy(std::begin(row), std::end(row), rows.begin() + row_count++ * ROW_WORDS);
            }
            timer.give_back(span.begun);
            if (span.owns_ended)
                timer.give_back(span.ended);
            timed.pop_front();
        }
    }

    static uint64_t word1_of(const Call &call, uint64_t flag)
    {
        return call.op | call.group << 16 | call.chunk << 32 | flag << 48;
    }

    void emit(const Call &call, uint64_t flag, uint64_t start, uint64_t end)
    {
        const uint64_t word1 = word1_of(call, flag);
        const uint64_t duration = end > start ? end - start : 0;
        if (owns()) { /* nobody else writes to the ring */
            s.write(s.writer, word1, call.word2, call.peer, call.size, call.sequence, start,
                    duration);
            return;
        }
        if (row_count == ROWS) {
            lost++;
            return;
        }
        const uint64_t row[] = {word1,         call.word2, call.peer, call.size,
                                call.sequence, start,      duration};
        std::copy(std::begin(row), std::end(row), rows.begin() + row_count++ * ROW_WORDS);
    }

    int find_work(const void *work) const
    {
        for (size_t i = in_flight.size(); i-- > 0;)
            if (in_flight[i].work == work)
                return in_flight[i].index;
        return -1;
    }

    /* Add a call to those in flight. */
    void add(int index)
    {
        const void *work = calls[index].work;
        const int known = find_work(work);
        if (known >= 0) { /* the address of a Work that is gone */
            remove(known);
            end_all_unwaited(known);
        }
        in_flight.push_back({work, index});
    }

    void remove(int index)
    {
        for (size_t i = in_flight.size(); i-- > 0;)
            if (in_flight[i].index == index) {
                in_flight[i] = in_flight.back();
                in_flight.pop_back();
                return;
            }
    }

    void forget(int index)
    {
        remove(index);
        release(index);
    }

    template <typename Pointer> void discard(Pointer pointer)
    {
        if (pointer)
            discarded.emplace_back(std::move(pointer));
    }

    void release(int index)
    {
        calls[index].phase = Phase::FREE;
        timer.give_back(calls[index].begun);
        timer.give_back(calls[index].wait_begun);
        calls[index].begun = calls[index].wait_begun = nullptr;
        discard(std::move(calls[index].kept));
        discard(std::move(calls[index].future));
        calls[index].generation++;
        free_calls.push_back(index);
    }

    struct Timed {
        uint64_t word1, word2, peer, size, sequence;
        void *begun, *ended;
        bool owns_ended;
    };

    const Start s;
    std::mutex mutex;
    Timer timer;
    std::deque<Timed> timed; /* oldest first */
    std::vector<Call> calls;
    std::vector<int> free_calls;
    std::vector<c10::intrusive_ptr<c10::intrusive_ptr_target>> discarded;
    std::vector<Group> groups;
    std::unordered_map<uint64_t, Channel> peers; /* references to values stay valid */
    std::unordered_map<uint64_t, uint64_t> peer_slots;
    std::vector<InFlight> in_flight; /* few: a search is cheaper than a hash table */
    std::vector<uint64_t> rows, scratch;
    size_t row_count = 0;
    int watched_task = -1, awaited_index = -1;
    uint32_t awaited_generation = 0;
    static thread_local int latest; /* launched last by this thread, without a wait since */
    static thread_local uint32_t latest_generation;
    static thread_local const Recorder *batch_of; /* null: this thread collects none */
    static thread_local std::vector<int> batch;
};

thread_local int Recorder::latest = -1;
thread_local uint32_t Recorder::latest_generation = 0;
thread_local const Recorder *Recorder::batch_of = nullptr;
thread_local std::vector<int> Recorder::batch;

/* Never deleted, nor what they were started with: calls may complete after recording has ended. */
std::vector<std::shared_ptr<Recorder>> &recorders = *new std::vector<std::shared_ptr<Recorder>>;
std::atomic<Recorder *> active{nullptr};

uint64_t bytes_of(const at::Tensor &tensor)
{
    return tensor.defined() && !tensor.is_sparse() ? tensor.nbytes() : 0;
}

uint64_t bytes_of(const c10::IValue &value)
{
    if (value.isTensor())
        return bytes_of(value.toTensor());
    uint64_t total = 0;
    if (value.isList())
        for (const c10::IValue &each : value.toListRef())
            total += bytes_of(each);
    return total;
}

const void *address_of(const at::Tensor &tensor)
{
    try {
        return tensor.defined() && tensor.has_storage() ? tensor.const_data_ptr() : nullptr;
    } catch (const std::exception &) {
        return nullptr; /* the compiler traces with tensors that have no memory */
    }
}

/* The first tensor in an argument; null if there is none. */
const at::Tensor *first_tensor(const c10::IValue &value)
{
    if (value.isTensor())
        return value.toTensor().defined() ? &value.toTensor() : nullptr;
    if (value.isList() && !value.toListRef().empty())
        return first_tensor(value.toListRef()[0]);
    return nullptr;
}

const c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

struct LaunchKernel : public c10::OperatorKernel {
    explicit LaunchKernel(const Operator &what, const c10::FunctionSchema &schema) : what(what)
    {
        const auto &arguments = schema.arguments();
        count = arguments.size();
        for (size_t i = 0; i < count; i++) {
            const std::string &name = arguments[i].name();
            if (name == "process_group")
                group = (int)i;
            else if (name == "dst" || name == "src")
                peer = (int)i;
            else if (name == "async_op" || name == "asyncOp")
                is_async = (int)i;
        }
        is_transfer = what.op == SEND || what.op == RECV;
    }

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
    {
        Recorder *recorder = active.load(std::memory_order_acquire);
        int index = -1;
        const void *output = nullptr;
        if (recorder != nullptr && group >= 0) {
            try {
                const c10::IValue *arguments = &(*stack)[stack->size() - count];
                const auto process_group = arguments[group].toCustomClass<c10d::ProcessGroup>();
                const uint64_t size = what.payload < 0 ? 0 : bytes_of(arguments[what.payload]);
                const int64_t rank = peer < 0 ? -1 : arguments[peer].toInt();
                Waits waits = Waits::UNKNOWN;
                if (is_async >= 0)
                    waits = arguments[is_async].toBool() ? Waits::LATER : Waits::AT_ONCE;
                const at::Tensor *result = first_tensor(arguments[0]);
                const at::Tensor *payload =
                    what.payload < 0 ? nullptr : first_tensor(arguments[what.payload]);
                output = result == nullptr ? nullptr : address_of(*result);
                index = recorder->begin(what.op, size, process_group, rank, is_transfer, waits,
                                        payload, result);
            } catch (const std::exception &) {
                recorder->lost++;
            }
        }
        if (index < 0) {
            op.redispatchBoxed(keys & BELOW, stack);
            return;
        }
        try {
            op.redispatchBoxed(keys & BELOW, stack);
        } catch (...) {
            recorder->abandon(index);
            throw;
        }
        c10::intrusive_ptr<c10d::Work> work;
        if (!op.schema().returns().empty() && !stack->empty() && stack->back().isCustomClass())
            work = stack->back().toCustomClass<c10d::Work>();
        recorder->launched(index, work, output, is_transfer);
    }

    const Operator what;
    size_t count = 0;
    int group = -1, peer = -1, is_async = -1;
    bool is_transfer = false;
};

void wait_kernel(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
{
    Recorder *recorder = active.load(std::memory_order_acquire);
    int64_t index = -1;
    if (recorder != nullptr && stack->back().isTensor())
        index = recorder->wait_begin_for_output(address_of(stack->back().toTensor()));
    if (index < 0) {
        op.redispatchBoxed(keys & BELOW, stack);
        return;
    }
    try {
        op.redispatchBoxed(keys & BELOW, stack);
    } catch (...) {
        recorder->wait_end((int)index, false);
        throw;
    }
    recorder->wait_end((int)index, true);
}

/* The all-reduce, as often as the reducer of DistributedDataParallel calls it, with typed arguments:
 * boxing them, as LaunchKernel does for any operator of any torch, costs more than recording. */
using Reduced = std::tuple<std::vector<at::Tensor>, c10::intrusive_ptr<c10d::Work>>;
using AllReduce = Reduced(at::TensorList, const c10::intrusive_ptr<c10d::ProcessGroup> &,
                          const c10::intrusive_ptr<c10d::ReduceOp> &,
                          const std::optional<at::Tensor> &, bool, int64_t);
constexpr const char *ALL_REDUCE_ARGUMENTS[] = {"tensors",        "process_group", "reduce_op",
                                                "sparse_indices", "async_op",      "timeout"};

bool is_typed(const c10::FunctionSchema &schema)
{
    const auto &arguments = schema.arguments();
    return schema.name() == "c10d::allreduce_" &&
           std::equal(arguments.begin(), arguments.end(), std::begin(ALL_REDUCE_ARGUMENTS),
                      std::end(ALL_REDUCE_ARGUMENTS),
                      [](const c10::Argument &each, const char *name) { return each.name() == name; });
}

Reduced all_reduce_kernel(c10::DispatchKeySet keys, at::TensorList tensors,
                          const c10::intrusive_ptr<c10d::ProcessGroup> &group,
                          const c10::intrusive_ptr<c10d::ReduceOp> &reduce_op,
                          const std::optional<at::Tensor> &sparse_indices, bool async_op,
                          int64_t timeout)
{
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("c10d::allreduce_", "").typed<AllReduce>();
    Recorder *recorder = active.load(std::memory_order_acquire);
    int index = -1;
    if (recorder != nullptr) {
        try {
            uint64_t size = 0;
            for (const at::Tensor &tensor : tensors)
                size += bytes_of(tensor);
            const at::Tensor *first = tensors.empty() ? nullptr : &tensors[0];
            index = recorder->begin(ALL_REDUCE, size, group, -1, false,
                                    async_op ? Waits::LATER : Waits::AT_ONCE, first, first);
        } catch (const std::exception &) {
            recorder->lost++;
        }
    }
    if (index < 0)
        return op.redispatch(keys & BELOW, tensors, group, reduce_op, sparse_indices, async_op,
                             timeout);
    Reduced result;
    try {
        result = op.redispatch(keys & BELOW, tensors, group, reduce_op, sparse_indices, async_op,
                               timeout);
    } catch (...) {
        recorder->abandon(index);
        throw;
    }
    const void *output = tensors.empty() ? nullptr : address_of(tensors[0]);
    recorder->launched(index, std::get<1>(result), output, false);
    return result;
}

std::vector<std::unique_ptr<torch::Library>> &libraries =
    *new std::vector<std::unique_ptr<torch::Library>>;

/* Writes the exception that ends the process, which a thread of NCCL, gloo or autograd threw and
 * nothing caught, to the file from which the agent learns how the rank ended (paceline_wire.ending).
 * Otherwise it is only on stderr, which belongs to the launcher. */
enum class Report { NONE, DUE, BEGUN, WRITTEN };
struct Termination {
    std::atomic<Report> report{Report::NONE};
    std::terminate_handler next = nullptr;
    std::string path, temporary;
    mode_t mode = 0600;
    pid_t pid = 0;
} &termination = *new Termination;
constexpr size_t ERROR_BYTES = 2048;
constexpr int LONGEST_REPORT_MS = 200;

std::string describe_exception()
{
    std::string text = "terminate called";
    const std::type_info *type = abi::__cxa_current_exception_type();
    if (type == nullptr)
        return text + " without an active exception";
    int failed = 0;
    char *name = abi::__cxa_demangle(type->name(), nullptr, nullptr, &failed);
    text += std::string(" after throwing an instance of '") + (failed ? type->name() : name) + "'";
    free(name);
    try {
        throw;
    } catch (const std::exception &error) {
        text += std::string("\n  what():  ") + error.what();
    } catch (...) {
    }
    return text;
}

std::string quoted(const std::string &text)
{
    std::string out = "\"";
    for (const unsigned char each : text.substr(0, ERROR_BYTES)) {
        char escape[8];
        if (each == '"' || each == '\\')
            (out += '\\') += (char)each;
        else if (each < 0x20)
            out.append(escape, snprintf(escape, sizeof escape, "\\u%04x", each));
        else
            out += each < 0x7f ? (char)each : '?'; /* may be no UTF-8 */
    }
    return out + '"';
}

void write_exception()
{
    const std::string content = "{\"error\":" + quoted(describe_exception()) + "}";
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const int file = open(termination.temporary.c_str(), flags, 0600);
    if (file < 0)
        return;
    const bool is_whole = fchmod(file, termination.mode) == 0 &&
                          write(file, content.data(), content.size()) == (ssize_t)content.size();
    close(file);
    if (is_whole) /* an error that was reported before stays */
        (void)!link(termination.temporary.c_str(), termination.path.c_str());
    unlink(termination.temporary.c_str());
}

[[noreturn]] void report_termination()
{
    Report due = Report::DUE;
    if (getpid() != termination.pid) { /* a child of the rank */
    } else if (termination.report.compare_exchange_strong(due, Report::BEGUN)) {
        try {
            write_exception();
        } catch (...) {
        }
        termination.report = Report::WRITTEN;
    } else { /* Several threads lose a peer at once, and the first abort ends the others. */
        for (int i = 0; i < LONGEST_REPORT_MS && termination.report == Report::BEGUN; i++)
            usleep(1000);
    }
    termination.next();
    abort();
}

} // namespace

extern "C" {

const uint64_t *pl_layout(size_t *count)
{
    *count = sizeof LAYOUT / sizeof *LAYOUT;
    return LAYOUT;
}

/* Register the kernels. Returns how many operators of this torch are recorded. */
int pl_install()
{
    const auto key = c10::DispatchKey::BackendSelect;
    int installed = 0;
    auto c10d = std::make_unique<torch::Library>(torch::Library::IMPL, "c10d", key, __FILE__, 1);
    for (const Operator &each : OPERATORS) {
        const std::string name = std::string("c10d::") + each.name;
        const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
        if (!found)
            continue;
        if (is_typed(found->schema()))
            c10d->impl(each.name, torch::CppFunction(TORCH_FN(all_reduce_kernel)));
        else
            c10d->impl(each.name, torch::CppFunction::makeFromBoxedFunctor(
                                      std::make_unique<LaunchKernel>(each, found->schema())));
        installed++;
    }
    libraries.push_back(std::move(c10d));
    auto functional =
        std::make_unique<torch::Library>(torch::Library::IMPL, "_c10d_functional", key, __FILE__, 2);
    functional->impl("wait_tensor", torch::CppFunction::makeFromBoxedFunction<&wait_kernel>());
    libraries.push_back(std::move(functional));
    return installed;
}

/* Remove the kernels. No thread may communicate meanwhile: torch's tables have no lock. */
void pl_remove() { libraries.clear(); }

void pl_start(const Start *start)
{
    auto recorder = std::make_shared<Recorder>(*start);
    recorder->shared = recorder;
    recorders.push_back(recorder);
    active.store(recorder.get(), std::memory_order_release);
}

void pl_stop() { active.store(nullptr, std::memory_order_release); }

/* Report an exception that ends this process in the file `path`; null: no longer. */
void pl_report_termination(const char *path, unsigned mode)
{
    termination.report = Report::NONE;
    if (path == nullptr)
        return;
    termination.path = path;
    termination.temporary = termination.path + ".new";
    termination.mode = mode;
    termination.pid = getpid();
    if (std::get_terminate() != report_termination)
        termination.next = std::set_terminate(report_termination);
    termination.report = Report::DUE;
}

void pl_set_group(uint64_t slot, uint64_t identifier, const int64_t *ranks, size_t count)
{
    if (Recorder *recorder = active.load())
        recorder->set_group(slot, identifier, ranks, count);
}

int64_t pl_wait_begin(void *work)
{
    Recorder *recorder = active.load(std::memory_order_acquire);
    return recorder == nullptr ? -1 : recorder->wait_begin_for(work);
}

int pl_needs_python(int64_t index)
{
    Recorder *recorder = active.load();
    return recorder != nullptr && recorder->needs_python((int)index);
}

void pl_describe(int64_t index, uint64_t *out)
{
    if (Recorder *recorder = active.load())
        recorder->describe((int)index, out);
}

void pl_set_source(int64_t index, uint64_t rank)
{
    if (Recorder *recorder = active.load())
        recorder->set_source((int)index, rank);
}

/* An action records this call itself. */
void pl_take(int64_t index)
{
    if (Recorder *recorder = active.load())
        recorder->take((int)index);
}

void pl_wait_end(int64_t index, int succeeded)
{
    if (Recorder *recorder = active.load())
        recorder->wait_end((int)index, succeeded != 0);
}

void pl_batch_begin()
{
    if (Recorder *recorder = active.load())
        recorder->batch_begin();
}

/* `work`: address of the Work of all calls of this thread since `pl_batch_begin`; null: none. */
void pl_batch_end(void *work)
{
    using Pointer = c10::intrusive_ptr<c10d::Work>;
    if (Recorder *recorder = active.load())
        recorder->batch_end(
            work == nullptr ? Pointer() : Pointer::unsafe_reclaim_from_nonowning((c10d::Work *)work));
}

/* Whether calls on a GPU can be recorded with this torch. */
int pl_measures_devices() { return Timer::is_possible(); }

void pl_set_anchor(void *event, int device, uint64_t host_ns)
{
    if (Recorder *recorder = active.load())
        recorder->set_anchor(event, device, host_ns);
}

size_t pl_take_rows(uint64_t *out, size_t most)
{
    Recorder *recorder = active.load(std::memory_order_acquire);
    return recorder == nullptr ? 0 : recorder->take_rows(out, most);
}

uint64_t pl_lost()
{
    Recorder *recorder = active.load();
    return recorder == nullptr ? 0 : recorder->lost.load();
}
}
