/* The writer's end of a ring in C: the code that runs for each section of a step.
 *
 * Between two kernels the host's caches are cold, and a line of Python costs several times as much
 * there as in a loop. `pure_python.py` does the same in Python, documents each part, and replaces
 * this module where it was not built. All functions run with the interpreter's lock held.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

/* Python compares LAYOUT with its own. Increment INTERFACE with each change to what Python calls
 * here; the other values are those of paceline_wire.ring and paceline_wire.spans. */
enum {
    INTERFACE = 6,
    STATE_HEAD = 0,
    STATE_STEP = 1,
    STATE_STEP_STARTED_NS = 2,
    STATE_MICROBATCH = 3,
    STATE_LOSS_STEP = 7,
    STATE_LOSS = 8,
    STATE_GRADIENT_NORM = 9,
    STATE_DEPTH = 10,
    STATE_EVALUATION_STEP = 11,
    STATE_EVALUATION_LOSS = 12,
    STATE_FRAMES = 16,
    FRAMES = 8,
    FRAME_WORDS = 4,
    GROUP_BYTES_SHIFT = 16,
    WORDS = 8,
    OP_STEP = 32,
    OP_DATA_WAIT = 33,
    OP_FORWARD = 1,
};
static const uint64_t NO_CHUNK = 0xFFFF, NONE_32 = 0xFFFFFFFF, NO_MICROBATCH = 0xFFFFFFFFull << 32;
static const uint64_t INFINITY_BITS = 0x7FFull << 52, NAN_BITS = 0xFFFull << 51;

static uint64_t unbound[512]; /* the state page of a writer before it is bound to a ring */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Convert any Python integer to a word of a record or page. Returns -1 with an exception set. */
static int as_word(PyObject *object, uint64_t *word)
{
    if (PyLong_CheckExact(object)) {
        *word = PyLong_AsUnsignedLongLong(object);
    } else {
        PyObject *number = PyNumber_Index(object);
        if (number == NULL)
            return -1;
        *word = PyLong_AsUnsignedLongLong(number);
        Py_DECREF(number);
    }
    return *word == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int as_words(PyObject *const *objects, Py_ssize_t given, Py_ssize_t wanted, uint64_t *words)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd integers, got %zd", wanted, given);
        return -1;
    }
    for (Py_ssize_t i = 0; i < wanted; i++)
        if (as_word(objects[i], &words[i]) < 0)
            return -1;
    return 0;
}

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Get writable memory of 64-bit words. Returns -1 with an exception set. */
static int get_words(PyObject *object, Py_buffer *view, Py_ssize_t least)
{
    if (PyObject_GetBuffer(object, view, PyBUF_WRITABLE) < 0)
        return -1;
    if (view->len < least * 8 || (uintptr_t)view->buf % 8) {
        PyBuffer_Release(view);
        PyErr_Format(PyExc_ValueError, "expected at least %zd aligned words", least);
        return -1;
    }
    return 0;
}

/* Writer */

typedef struct {
    PyObject_HEAD
    uint64_t *state, *spans;
    uint64_t mask, head, depth, chunk, word2, step, step_started_ns, step_head, owner, failures;
    uint64_t forward_started_ns; /* 0: not in a forward pass */
    uint64_t transfer;  /* 1 << 17 | receives << 16 | op of the innermost open transfer action */
    uint64_t transfers_launched; /* inside transfer actions */
    PyObject *timer;    /* EventTimer; NULL: no device */
    PyObject *action;   /* the innermost open transfer action; NULL: none */
    PyObject *sections; /* dict: sections of the owner thread, by name */
    Py_buffer state_view, spans_view;
} Writer;

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Writer *self = (Writer *)allocate(type, 0);
    if (self != NULL) {
        self->state = self->spans = unbound;
        self->chunk = NO_CHUNK;
        self->word2 = NO_MICROBATCH;
        self->owner = PyThread_get_thread_ident();
        if ((self->sections = PyDict_New()) == NULL)
            Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int writer_bind(Writer *self, PyObject *state, PyObject *spans)
{
    Py_buffer state_view, spans_view;
    if (get_words(state, &state_view, 512) < 0)
        return -1;
    if (get_words(spans, &spans_view, WORDS) < 0) {
        PyBuffer_Release(&state_view);
        return -1;
    }
    uint64_t capacity = (uint64_t)spans_view.len / (WORDS * 8);
    if (capacity & (capacity - 1)) {
        PyBuffer_Release(&state_view);
        PyBuffer_Release(&spans_view);
        PyErr_SetString(PyExc_ValueError, "expected a power of two of records");
        return -1;
    }
    PyBuffer_Release(&self->state_view);
    PyBuffer_Release(&self->spans_view);
    self->state_view = state_view;
    self->spans_view = spans_view;
    self->state = state_view.buf;
    self->spans = spans_view.buf;
    self->mask = capacity - 1;
    return 0;
}

static int writer_init(Writer *self, PyObject *args, PyObject *kwargs)
{
    PyObject *state, *spans;
    if (!PyArg_ParseTuple(args, "OO", &state, &spans))
        return -1;
    return writer_bind(self, state, spans);
}

static int writer_traverse(Writer *self, visitproc visit, void *arg)
{
    Py_VISIT((PyObject *)Py_TYPE((PyObject *)self));
    Py_VISIT(self->timer);
    Py_VISIT(self->action);
    Py_VISIT(self->sections);
    return 0;
}

static int writer_clear(Writer *self)
{
    Py_CLEAR(self->timer);
    Py_CLEAR(self->action);
    Py_CLEAR(self->sections);
    return 0;
}

static void writer_dealloc(Writer *self)
{
    PyObject_GC_UnTrack(self);
    writer_clear(self);
    PyBuffer_Release(&self->state_view);
    PyBuffer_Release(&self->spans_view);
    free_object((PyObject *)self);
}

static void write_record(Writer *self, uint64_t word1, uint64_t word2, uint64_t peer, uint64_t size,
                         uint64_t sequence, uint64_t start_ns, uint64_t duration_ns)
{
    uint64_t *record = self->spans + (self->head & self->mask) * WORDS;
    record[0] = self->head;
    record[1] = word1;
    record[2] = word2;
    record[3] = peer;
    record[4] = size;
    record[5] = sequence;
    record[6] = start_ns;
    record[7] = duration_ns;
    __atomic_store_n(&self->state[STATE_HEAD], ++self->head, __ATOMIC_RELEASE);
}

static uint64_t push_frame(Writer *self, uint64_t op, uint64_t start_ns, uint64_t place,
                           uint64_t sequence)
{
    uint64_t depth = self->depth;
    if (depth < FRAMES) {
        uint64_t *frame = self->state + STATE_FRAMES + depth * FRAME_WORDS;
        frame[0] = op;
        frame[1] = start_ns;
        frame[2] = place;
        frame[3] = sequence;
    }
    __atomic_store_n(&self->state[STATE_DEPTH], self->depth = depth + 1, __ATOMIC_RELEASE);
    return depth;
}

static void clear_free_frame(Writer *self)
{
    if (self->depth < FRAMES) {
        uint64_t *frame = self->state + STATE_FRAMES + self->depth * FRAME_WORDS;
        frame[2] = NONE_32;
        frame[3] = 0;
    }
}

static void pop_frame(Writer *self, uint64_t depth)
{
    self->state[STATE_DEPTH] = self->depth = depth;
    clear_free_frame(self);
}

static void clear_all_frames(Writer *self)
{
    for (uint64_t depth = self->depth < FRAMES ? self->depth : FRAMES; depth-- > 0;)
        pop_frame(self, depth);
    self->state[STATE_DEPTH] = self->depth = 0;
}

static PyObject *writer_write(Writer *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t w[7];
    if (as_words(args, count, 7, w) < 0)
        return NULL;
    write_record(self, w[0], w[1], w[2], w[3], w[4], w[5], w[6]);
    Py_RETURN_NONE;
}

static void write_simple(Writer *self, uint64_t op, uint64_t start_ns, uint64_t end_ns)
{
    write_record(self, op | NO_CHUNK << 32, self->step | NO_MICROBATCH, NONE_32, 0, 0, start_ns,
                 end_ns - start_ns);
}

static PyObject *writer_write_simple(Writer *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t w[3];
    if (as_words(args, count, 3, w) < 0)
        return NULL;
    write_simple(self, w[0], w[1], w[2]);
    Py_RETURN_NONE;
}

static PyObject *writer_push(Writer *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t w[4];
    if (as_words(args, count, 4, w) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(push_frame(self, w[0], w[1], w[2], w[3]));
}

static PyObject *writer_pop(Writer *self, PyObject *depth)
{
    uint64_t word;
    if (as_word(depth, &word) < 0)
        return NULL;
    pop_frame(self, word);
    Py_RETURN_NONE;
}

static PyObject *writer_clear_place(Writer *self, PyObject *unused)
{
    clear_free_frame(self);
    Py_RETURN_NONE;
}

static PyObject *writer_clear_frames(Writer *self, PyObject *unused)
{
    clear_all_frames(self);
    Py_RETURN_NONE;
}

static PyObject *writer_begin_step(Writer *self, PyObject *step)
{
    uint64_t word;
    if (as_word(step, &word) < 0)
        return NULL;
    uint64_t now = self->step_started_ns = now_ns();
    self->step = word;
    self->word2 = word | NO_MICROBATCH;
    self->chunk = NO_CHUNK;
    Py_CLEAR(self->action);
    self->state[STATE_STEP] = word;
    self->state[STATE_STEP_STARTED_NS] = now;
    self->state[STATE_MICROBATCH] = 0;
    clear_all_frames(self);
    push_frame(self, OP_STEP, now, NONE_32, 0);
    push_frame(self, OP_DATA_WAIT, now, NONE_32, 0);
    Py_RETURN_NONE;
}

static PyObject *writer_end_data_wait(Writer *self, PyObject *unused)
{
    pop_frame(self, 1);
    write_simple(self, OP_DATA_WAIT, self->step_started_ns, now_ns());
    self->step_head = self->head;
    Py_RETURN_NONE;
}

static PyObject *writer_end_step(Writer *self, PyObject *unused)
{
    write_simple(self, OP_STEP, self->step_started_ns, now_ns());
    Py_RETURN_NONE;
}

static PyObject *writer_begin_forward(Writer *self, PyObject *unused)
{
    self->forward_started_ns = now_ns();
    Py_RETURN_NONE;
}

static PyObject *writer_end_forward(Writer *self, PyObject *unused)
{
    const uint64_t started = self->forward_started_ns;
    self->forward_started_ns = 0;
    if (started >= self->step_started_ns && self->step_started_ns > 0)
        write_simple(self, OP_FORWARD, started, now_ns());
    Py_RETURN_NONE;
}

static PyObject *writer_drop_forward(Writer *self, PyObject *unused)
{
    self->forward_started_ns = 0;
    Py_RETURN_NONE;
}

/* Store the bits of a value. Returns 1, 0 for None, or -1 with an exception set. */
static int as_bits(PyObject *given, uint64_t *bits)
{
    if (given == Py_None)
        return 0;
    PyObject *item = NULL;
    if (!PyFloat_CheckExact(given) && (item = PyObject_GetAttrString(given, "item")) == NULL)
        PyErr_Clear();
    PyObject *scalar = item == NULL ? Py_NewRef(given) : PyObject_CallNoArgs(item);
    PyObject *number = scalar == NULL ? NULL : PyNumber_Float(scalar);
    Py_XDECREF(item);
    Py_XDECREF(scalar);
    if (number == NULL)
        return -1;
    double value = PyFloat_AsDouble(number);
    Py_DECREF(number);
    memcpy(bits, &value, sizeof value);
    return 1;
}

/* `values`: loss, gradient norm, evaluation loss. Returns -1 with an exception set. */
static int show_values(Writer *self, uint64_t step, PyObject *const *values)
{
    uint64_t loss = 0, norm = 0, evaluation = 0;
    int has_loss, has_norm, has_evaluation;
    if ((has_loss = as_bits(values[0], &loss)) < 0 || (has_norm = as_bits(values[1], &norm)) < 0 ||
        (has_evaluation = as_bits(values[2], &evaluation)) < 0)
        return -1;
    if (!has_norm)
        norm = NAN_BITS;
    else if ((norm & INFINITY_BITS) == INFINITY_BITS) /* an infinity or NaN */
        norm = INFINITY_BITS; /* NaN on the page means "not given" */
    if (has_loss) {
        self->state[STATE_LOSS] = loss;
        self->state[STATE_GRADIENT_NORM] = norm;
        self->state[STATE_LOSS_STEP] = step + 1;
    }
    if (has_evaluation) {
        self->state[STATE_EVALUATION_LOSS] = evaluation;
        self->state[STATE_EVALUATION_STEP] = step + 1;
    }
    return 0;
}

static PyObject *writer_report(Writer *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t step;
    if (count != 4)
        return PyErr_SetString(PyExc_TypeError, "expected a step and three values"), NULL;
    if (as_word(args[0], &step) < 0 || show_values(self, step, args + 1) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int is_owner_thread(Writer *self)
{
    return self->owner == PyThread_get_thread_ident();
}

static int has_timer(Writer *self)
{
    return self->timer != NULL && self->timer != Py_None;
}

static PyObject *writer_try_report(Writer *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !is_owner_thread(self) || has_timer(self))
        Py_RETURN_FALSE;
    if (show_values(self, self->step, args) < 0) {
        PyErr_Clear(); /* the caller's slow path meets it again, counts and logs it */
        Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *writer_find_section(Writer *self, PyObject *name)
{
    if (is_owner_thread(self)) {
        PyObject *section = PyDict_GetItemWithError(self->sections, name);
        if (section != NULL)
            return Py_NewRef(section);
        PyErr_Clear(); /* not hashable */
    }
    Py_RETURN_NONE;
}

static PyObject *writer_rebind(Writer *self, PyObject *args)
{
    PyObject *state, *spans;
    if (!PyArg_ParseTuple(args, "OO", &state, &spans) || writer_bind(self, state, spans) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Return the addresses that collectives/_process_groups.cpp uses, in the order of its Start. */
static PyObject *writer_addresses(Writer *self, PyObject *unused)
{
    const void *addresses[] = {
        self->state,           &self->word2,    &self->chunk,
        &self->step,           &self->owner,    &self->transfer,
        &self->transfers_launched, self,        (void *)(uintptr_t)push_frame,
        (void *)(uintptr_t)pop_frame, (void *)(uintptr_t)write_record,
    };
    const Py_ssize_t count = sizeof addresses / sizeof *addresses;
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *address = PyLong_FromVoidPtr((void *)addresses[i]);
        if (address == NULL || PyList_SetItem(list, i, address) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Write the rows that a function `size_t take(uint64_t *rows, size_t most)` returns. */
static PyObject *writer_take_rows(Writer *self, PyObject *address)
{
    size_t (*take)(uint64_t *, size_t) =
        (size_t (*)(uint64_t *, size_t))(uintptr_t)PyLong_AsVoidPtr(address);
    if (take == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    uint64_t rows[64 * 7];
    size_t count;
    do {
        count = take(rows, 64);
        for (const uint64_t *row = rows; row < rows + count * 7; row += 7)
            write_record(self, row[0], row[1], row[2], row[3], row[4], row[5], row[6]);
    } while (count == 64);
    Py_RETURN_NONE;
}

static PyMethodDef writer_methods[] = {
    {"addresses", (PyCFunction)writer_addresses, METH_NOARGS, NULL},
    {"take_rows", (PyCFunction)writer_take_rows, METH_O, NULL},
    {"write", (PyCFunction)(void (*)(void))writer_write, METH_FASTCALL, NULL},
    {"write_simple", (PyCFunction)(void (*)(void))writer_write_simple, METH_FASTCALL, NULL},
    {"push", (PyCFunction)(void (*)(void))writer_push, METH_FASTCALL, NULL},
    {"pop", (PyCFunction)writer_pop, METH_O, NULL},
    {"clear_place", (PyCFunction)writer_clear_place, METH_NOARGS, NULL},
    {"clear_frames", (PyCFunction)writer_clear_frames, METH_NOARGS, NULL},
    {"begin_step", (PyCFunction)writer_begin_step, METH_O, NULL},
    {"end_data_wait", (PyCFunction)writer_end_data_wait, METH_NOARGS, NULL},
    {"end_step", (PyCFunction)writer_end_step, METH_NOARGS, NULL},
    {"begin_forward", (PyCFunction)writer_begin_forward, METH_NOARGS, NULL},
    {"end_forward", (PyCFunction)writer_end_forward, METH_NOARGS, NULL},
    {"drop_forward", (PyCFunction)writer_drop_forward, METH_NOARGS, NULL},
    {"report", (PyCFunction)(void (*)(void))writer_report, METH_FASTCALL, NULL},
    {"try_report", (PyCFunction)(void (*)(void))writer_try_report, METH_FASTCALL, NULL},
    {"find_section", (PyCFunction)writer_find_section, METH_O, NULL},
    {"rebind", (PyCFunction)writer_rebind, METH_VARARGS, NULL},
    {NULL},
};

static PyMemberDef writer_members[] = {
    {"head", T_ULONGLONG, offsetof(Writer, head), READONLY},
    {"depth", T_ULONGLONG, offsetof(Writer, depth), READONLY},
    {"chunk", T_ULONGLONG, offsetof(Writer, chunk), 0},
    {"word2", T_ULONGLONG, offsetof(Writer, word2), 0},
    {"step", T_ULONGLONG, offsetof(Writer, step), READONLY},
    {"step_head", T_ULONGLONG, offsetof(Writer, step_head), READONLY},
    {"owner", T_ULONGLONG, offsetof(Writer, owner), 0},
    {"failures", T_ULONGLONG, offsetof(Writer, failures), 0},
    {"transfer", T_ULONGLONG, offsetof(Writer, transfer), 0},
    {"transfers_launched", T_ULONGLONG, offsetof(Writer, transfers_launched), 0},
    {"timer", T_OBJECT, offsetof(Writer, timer), 0},
    {"action", T_OBJECT, offsetof(Writer, action), 0},
    {"sections", T_OBJECT_EX, offsetof(Writer, sections), READONLY},
    {"step_started_ns", T_ULONGLONG, offsetof(Writer, step_started_ns), READONLY},
    {NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_new, writer_new},         {Py_tp_init, writer_init},
    {Py_tp_traverse, writer_traverse}, {Py_tp_clear, writer_clear},
    {Py_tp_dealloc, writer_dealloc}, {Py_tp_methods, writer_methods},
    {Py_tp_members, writer_members}, {0, NULL},
};

static PyType_Spec writer_spec = {
    .name = "paceline.writer._native.Writer",
    .basicsize = sizeof(Writer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = writer_slots,
};

/* Section */

typedef struct {
    PyObject_HEAD
    Writer *recorder;
    uint64_t op, start, depth;
    uint64_t word2, chunk; /* the recorder's, to restore after a pipeline action */
    PyObject *outer; /* list: (start, depth, word2, chunk) of enclosing uses; NULL: never nested */
} Section;

static PyTypeObject *writer_type;

static int section_init(Section *self, PyObject *args, PyObject *kwargs)
{
    PyObject *recorder, *op;
    uint64_t word;
    if (!PyArg_ParseTuple(args, "O!O", writer_type, &recorder, &op) || as_word(op, &word) < 0)
        return -1;
    Py_INCREF(recorder);
    Py_XDECREF((PyObject *)self->recorder);
    self->recorder = (Writer *)recorder;
    self->op = word;
    return 0;
}

static int section_traverse(Section *self, visitproc visit, void *arg)
{
    Py_VISIT((PyObject *)Py_TYPE((PyObject *)self));
    Py_VISIT(self->recorder);
    Py_VISIT(self->outer);
    return 0;
}

static int section_clear(Section *self)
{
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->outer);
    return 0;
}

static void section_dealloc(Section *self)
{
    PyObject_GC_UnTrack(self);
    section_clear(self);
    free_object((PyObject *)self);
}

static Writer *recorder_of(Section *self)
{
    if (self->recorder == NULL)
        PyErr_SetString(PyExc_RuntimeError, "a section without a recorder");
    return self->recorder;
}

static int push_outer(Section *self)
{
    if (self->outer == NULL && (self->outer = PyList_New(0)) == NULL)
        return -1;
    PyObject *saved = Py_BuildValue("KKKK", self->start, self->depth, self->word2, self->chunk);
    int failed = saved == NULL || PyList_Append(self->outer, saved) < 0;
    Py_XDECREF(saved);
    return failed ? -1 : 0;
}

/* Restore the enclosing use of the same section, if there is one. */
static int pop_outer(Section *self)
{
    Py_ssize_t count = self->outer == NULL ? 0 : PyList_Size(self->outer);
    self->start = 0;
    if (count == 0)
        return 0;
    PyObject *saved = PyList_GetItem(self->outer, count - 1);
    unsigned long long w[4];
    if (!PyArg_ParseTuple(saved, "KKKK", &w[0], &w[1], &w[2], &w[3]))
        return -1;
    self->start = w[0], self->depth = w[1], self->word2 = w[2], self->chunk = w[3];
    return PyList_SetSlice(self->outer, count - 1, count, NULL);
}

/* Save an enclosing use of this section. Returns the recorder, or NULL with an exception set. */
static Writer *begin(Section *self)
{
    Writer *recorder = recorder_of(self);
    return recorder == NULL || (self->start && push_outer(self) < 0) ? NULL : recorder;
}

static PyObject *enter(Section *self, Writer *recorder)
{
    self->depth = recorder->depth;
    self->start = now_ns();
    if (self->depth < FRAMES) { /* place and sequence of a free frame are clear */
        uint64_t *frame = recorder->state + STATE_FRAMES + self->depth * FRAME_WORDS;
        frame[0] = self->op;
        frame[1] = self->start;
    }
    __atomic_store_n(&recorder->state[STATE_DEPTH], recorder->depth = self->depth + 1,
                     __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyObject *section_enter(Section *self, PyObject *unused)
{
    Writer *recorder = begin(self);
    return recorder == NULL ? NULL : enter(self, recorder);
}

static void leave(Section *self, Writer *recorder, uint64_t peer, uint64_t size, uint64_t sequence)
{
    write_record(recorder, self->op | recorder->chunk << 32, recorder->word2, peer, size, sequence,
                 self->start, now_ns() - self->start);
    recorder->state[STATE_DEPTH] = recorder->depth = self->depth;
}

static PyObject *section_exit(Section *self, PyObject *const *args, Py_ssize_t count)
{
    Writer *recorder = recorder_of(self);
    if (recorder == NULL)
        return NULL;
    leave(self, recorder, NONE_32, 0, 0);
    if (pop_outer(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *section_close(Section *self, PyObject *unused)
{
    Writer *recorder = recorder_of(self);
    if (recorder == NULL)
        return NULL;
    pop_frame(recorder, self->depth);
    if (pop_outer(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef section_methods[] = {
    {"__enter__", (PyCFunction)section_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))section_exit, METH_FASTCALL, NULL},
    {"close", (PyCFunction)section_close, METH_NOARGS, NULL},
    {NULL},
};

static PyMemberDef section_members[] = {
    {"recorder", T_OBJECT_EX, offsetof(Section, recorder), READONLY},
    {"op", T_ULONGLONG, offsetof(Section, op), READONLY},
    {"start", T_ULONGLONG, offsetof(Section, start), READONLY},
    {"depth", T_ULONGLONG, offsetof(Section, depth), READONLY},
    {NULL},
};

static PyType_Slot section_slots[] = {
    {Py_tp_init, section_init},       {Py_tp_traverse, section_traverse},
    {Py_tp_clear, section_clear},     {Py_tp_dealloc, section_dealloc},
    {Py_tp_methods, section_methods}, {Py_tp_members, section_members},
    {0, NULL},
};

static PyType_Spec section_spec = {
    .name = "paceline.writer._native.Section",
    .basicsize = sizeof(Section),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = section_slots,
};

/* Pipelining */

typedef struct {
    Section section;
    uint64_t microbatch, chunk, peer, size, sequence;
} Pipelining;

static int word_or_none(PyObject *object, uint64_t *word)
{
    *word = NONE_32;
    return object == Py_None ? 0 : as_word(object, word);
}

static int pipelining_init(Pipelining *self, PyObject *args, PyObject *kwargs)
{
    PyObject *recorder, *op, *microbatch, *chunk, *peer;
    if (!PyArg_ParseTuple(args, "OOOOO", &recorder, &op, &microbatch, &chunk, &peer) ||
        word_or_none(microbatch, &self->microbatch) < 0 || as_word(chunk, &self->chunk) < 0 ||
        word_or_none(peer, &self->peer) < 0)
        return -1;
    PyObject *rest = PyTuple_Pack(2, recorder, op);
    int failed = rest == NULL || section_init(&self->section, rest, NULL) < 0;
    Py_XDECREF(rest);
    return failed ? -1 : 0;
}

static PyObject *pipelining_enter(Pipelining *self, PyObject *unused)
{
    Section *section = &self->section;
    Writer *recorder = begin(section);
    if (recorder == NULL)
        return NULL;
    section->word2 = recorder->word2;
    section->chunk = recorder->chunk;
    recorder->word2 = recorder->step | self->microbatch << 32;
    recorder->chunk = self->chunk;
    recorder->state[STATE_MICROBATCH] = (self->microbatch + 1) & NONE_32;
    return enter(section, recorder);
}

static void leave_microbatch(Section *section, Writer *recorder)
{
    recorder->word2 = section->word2;
    recorder->chunk = section->chunk;
    recorder->state[STATE_MICROBATCH] = ((section->word2 >> 32) + 1) & NONE_32;
}

static PyObject *pipelining_exit(Pipelining *self, PyObject *const *args, Py_ssize_t count)
{
    Section *section = &self->section;
    Writer *recorder = recorder_of(section);
    if (recorder == NULL)
        return NULL;
    recorder->chunk = self->chunk; /* the block may have changed it */
    leave(section, recorder, self->peer, self->size, self->sequence);
    leave_microbatch(section, recorder);
    if (pop_outer(section) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *pipelining_close(Pipelining *self, PyObject *unused)
{
    Writer *recorder = recorder_of(&self->section);
    if (recorder == NULL)
        return NULL;
    leave_microbatch(&self->section, recorder);
    return section_close(&self->section, NULL);
}

static PyMethodDef pipelining_methods[] = {
    {"__enter__", (PyCFunction)pipelining_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))pipelining_exit, METH_FASTCALL, NULL},
    {"close", (PyCFunction)pipelining_close, METH_NOARGS, NULL},
    {NULL},
};

static PyMemberDef pipelining_members[] = {
    {"microbatch", T_ULONGLONG, offsetof(Pipelining, microbatch), READONLY},
    {"chunk", T_ULONGLONG, offsetof(Pipelining, chunk), READONLY},
    {"peer", T_ULONGLONG, offsetof(Pipelining, peer), 0},
    {"size", T_ULONGLONG, offsetof(Pipelining, size), 0},
    {"sequence", T_ULONGLONG, offsetof(Pipelining, sequence), 0},
    {NULL},
};

static PyType_Slot pipelining_slots[] = {
    {Py_tp_init, pipelining_init},       {Py_tp_traverse, section_traverse},
    {Py_tp_clear, section_clear},        {Py_tp_dealloc, section_dealloc},
    {Py_tp_methods, pipelining_methods}, {Py_tp_members, pipelining_members},
    {0, NULL},
};

static PyType_Spec pipelining_spec = {
    .name = "paceline.writer._native.Pipelining",
    .basicsize = sizeof(Pipelining),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = pipelining_slots,
};

/* Channel */

typedef struct {
    PyObject_HEAD
    uint64_t *words;
    Py_ssize_t entered, left, entered_ns, latest; /* positions in words */
    uint64_t sequence, group;
    PyObject *reference; /* weak, to the process group; NULL for a peer's channel */
    Py_buffer view;
} Channel;

static int channel_init(Channel *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"words",  "entered", "left",      "entered_ns",
                            "latest", "group",   "reference", NULL};
    PyObject *words, *reference = NULL;
    unsigned long long group = 0;
    Py_ssize_t at[4];
    Py_buffer view;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onnnn|KO", names, &words, &at[0], &at[1],
                                     &at[2], &at[3], &group, &reference))
        return -1;
    Py_ssize_t most = 0;
    for (int i = 0; i < 4; i++) {
        if (at[i] < 0)
            return PyErr_SetString(PyExc_ValueError, "positions must not be negative"), -1;
        most = at[i] > most ? at[i] : most;
    }
    if (get_words(words, &view, most + 1) < 0)
        return -1;
    PyBuffer_Release(&self->view);
    self->view = view;
    self->words = view.buf;
    self->entered = at[0], self->left = at[1], self->entered_ns = at[2], self->latest = at[3];
    self->group = group;
    Py_XINCREF(reference);
    Py_XDECREF(self->reference);
    self->reference = reference;
    return 0;
}

static int channel_traverse(Channel *self, visitproc visit, void *arg)
{
    Py_VISIT((PyObject *)Py_TYPE((PyObject *)self));
    Py_VISIT(self->reference);
    return 0;
}

static int channel_clear(Channel *self)
{
    Py_CLEAR(self->reference);
    return 0;
}

static void channel_dealloc(Channel *self)
{
    PyObject_GC_UnTrack(self);
    channel_clear(self);
    PyBuffer_Release(&self->view);
    free_object((PyObject *)self);
}

static uint64_t enter_channel(Channel *self, uint64_t operation, uint64_t now)
{
    self->words[self->latest] = operation;
    self->words[self->entered_ns] = now;
    __atomic_store_n(&self->words[self->entered], ++self->sequence, __ATOMIC_RELEASE);
    return self->sequence;
}

static PyObject *channel_enter(Channel *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t w[2];
    if (as_words(args, count, 2, w) < 0)
        return NULL;
    if (self->words == NULL)
        return PyErr_SetString(PyExc_RuntimeError, "a channel without words"), NULL;
    return PyLong_FromUnsignedLongLong(enter_channel(self, w[0], w[1]));
}

static PyObject *channel_leave(Channel *self, PyObject *sequence)
{
    uint64_t word;
    if (as_word(sequence, &word) < 0)
        return NULL;
    if (self->words == NULL)
        return PyErr_SetString(PyExc_RuntimeError, "a channel without words"), NULL;
    if (self->words[self->left] < word)
        self->words[self->left] = word;
    Py_RETURN_NONE;
}

static PyMethodDef channel_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))channel_enter, METH_FASTCALL, NULL},
    {"leave", (PyCFunction)channel_leave, METH_O, NULL},
    {NULL},
};

static PyMemberDef channel_members[] = {
    {"group", T_ULONGLONG, offsetof(Channel, group), READONLY},
    {"reference", T_OBJECT, offsetof(Channel, reference), READONLY},
    {NULL},
};

static PyType_Slot channel_slots[] = {
    {Py_tp_init, channel_init},       {Py_tp_traverse, channel_traverse},
    {Py_tp_clear, channel_clear},     {Py_tp_dealloc, channel_dealloc},
    {Py_tp_methods, channel_methods}, {Py_tp_members, channel_members},
    {0, NULL},
};

static PyType_Spec channel_spec = {
    .name = "paceline.writer._native.Channel",
    .basicsize = sizeof(Channel),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = channel_slots,
};

/* The method that replaces `Work.wait`; it records the wait by functions of
 * collectives/_process_groups.cpp. A process has one, because a method descriptor, which is called
 * without a bound method or a tuple, holds no state of its own. */

static struct {
    PyObject *original; /* torch's method */
    PyObject *python;   /* ends a wait that needs Python: called with the work and the call */
    int64_t (*begin)(void *work);
    int (*needs_python)(int64_t call);
    void (*end)(int64_t call, int outcome);
} waiting;

static PyObject *call_original(PyObject *work, PyObject *args, PyObject *kwargs)
{
    const Py_ssize_t count = PyTuple_Size(args);
    if (count == 0 && kwargs == NULL)
        return PyObject_CallFunctionObjArgs(waiting.original, work, NULL);
    PyObject *all = PyTuple_New(count + 1), *result = NULL;
    if (all == NULL)
        return NULL;
    PyTuple_SetItem(all, 0, Py_NewRef(work));
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SetItem(all, i + 1, Py_NewRef(PyTuple_GetItem(args, i)));
    result = PyObject_Call(waiting.original, all, kwargs);
    Py_DECREF(all);
    return result;
}

static PyObject *work_wait(PyObject *work, PyObject *args, PyObject *kwargs)
{
    /* A pybind11 object holds the address of its C++ object right after the header. */
    const int64_t call = waiting.begin(*(void **)(work + 1));
    PyObject *result = call_original(work, args, kwargs);
    if (call < 0)
        return result;
    if (result == NULL || !waiting.needs_python(call)) {
        waiting.end(call, result != NULL);
        return result;
    }
    PyObject *done = PyObject_CallFunction(waiting.python, "OL", work, (long long)call);
    if (done == NULL) {
        PyErr_Clear();
        waiting.end(call, 1);
    }
    Py_XDECREF(done);
    return result;
}

static PyMethodDef work_wait_method = {"wait", (PyCFunction)(void (*)(void))work_wait,
                                       METH_VARARGS | METH_KEYWORDS, NULL};

/* Return the method for a class of Works. */
static PyObject *make_wait(PyObject *module, PyObject *args)
{
    PyObject *type, *original, *python;
    unsigned long long begin, needs_python, end;
    if (!PyArg_ParseTuple(args, "OOOKKK", &type, &original, &python, &begin, &needs_python, &end))
        return NULL;
    PyObject *method = PyDescr_NewMethod((PyTypeObject *)type, &work_wait_method);
    if (method == NULL)
        return NULL;
    waiting.original = Py_NewRef(original);
    waiting.python = Py_NewRef(python);
    waiting.begin = (int64_t (*)(void *))(uintptr_t)begin;
    waiting.needs_python = (int (*)(int64_t))(uintptr_t)needs_python;
    waiting.end = (void (*)(int64_t, int))(uintptr_t)end;
    return method;
}

static PyMethodDef functions[] = {{"make_wait", make_wait, METH_VARARGS, NULL}, {NULL}};

/* Module */

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, (PyObject *)base);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "paceline.writer._native", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    writer_type = add_type(module, &writer_spec, NULL);
    PyTypeObject *channel = add_type(module, &channel_spec, NULL);
    PyTypeObject *section = add_type(module, &section_spec, NULL);
    PyTypeObject *pipelining =
        section == NULL ? NULL : add_type(module, &pipelining_spec, section);
    PyObject *layout = Py_BuildValue(
        "(iiiiiiiiiiiiiiiiiii)", INTERFACE, STATE_HEAD, STATE_STEP, STATE_STEP_STARTED_NS,
        STATE_MICROBATCH, STATE_LOSS_STEP, STATE_LOSS, STATE_GRADIENT_NORM, STATE_DEPTH,
        STATE_EVALUATION_STEP, STATE_EVALUATION_LOSS, STATE_FRAMES, FRAMES, FRAME_WORDS,
        GROUP_BYTES_SHIFT, WORDS, OP_STEP, OP_DATA_WAIT, OP_FORWARD);
    if (writer_type == NULL || channel == NULL || pipelining == NULL ||
        layout == NULL || PyModule_AddObject(module, "LAYOUT", layout) < 0)
        Py_CLEAR(module);
    return module;
}
