/*
 * nvrtc.cpp: in NVRTC's place: hands the kernels' text to a C++ compiler, with the toy's words and near verbs in place of a
 * GPU's, and gives back a shared library that the twin's driver loads as a module.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#define TWIN extern "C" __attribute__((visibility("default")))

namespace {

/* Results of NVRTC. */
enum { kSuccess = 0, kInvalidInput = 3, kInvalidProgram = 4, kCompilation = 6, kInternal = 11 };

struct Program {
    std::string text, name, log, module;
    std::vector<std::pair<std::string, std::string>> headers;
};

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

/* The folder of this library: the toy's headers lie there, too. */
std::string home() {
    Dl_info found;
    if (!dladdr((const void*)&home, &found)) return ".";
    const std::string path = found.dli_fname;
    return path.substr(0, path.rfind('/'));
}

bool write(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    return bool(file.flush());
}
std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

/* Runs a program; what it says goes to a file. */
int run(const std::vector<std::string>& words, const std::string& said) {
    std::vector<char*> argv;
    for (const auto& word : words) argv.push_back((char*)word.c_str());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, said.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t child;
    const int begun = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    int status = begun;
    if (begun == 0) waitpid(child, &status, 0);
    return status;
}

/* The name of the one kernel in a text, with its namespace. */
std::string kernel_of(const std::string& text) {
    std::size_t at = text.find("EP_KERNEL(");
    const bool marked = at != std::string::npos;
    if (!marked) at = text.find("__launch_bounds__(");
    if (at == std::string::npos) return "";
    int open = 0;
    do {
        if (text[at] == '(') ++open;
        if (text[at] == ')' && --open == 0) break;
    } while (++at < text.size());
    const std::size_t begin = text.find_first_not_of(" \n", at + 1);
    const std::size_t end = text.find('(', begin);
    if (begin == std::string::npos || end == std::string::npos) return "";
    std::string name = text.substr(begin, end - begin);
    const std::size_t space = text.find("namespace ");
    if (!marked && text.find("extern \"C\" __global__") == std::string::npos && space != std::string::npos) {
        const std::size_t first = space + 10;
        name = text.substr(first, text.find(' ', first) - first) + "::" + name;
    }
    return name;
}

/* Of sm_80 and the like: what kernels ask for. */
std::string arch_of(const std::string& option) {
    std::string number;
    for (const char letter : option)
        if (letter >= '0' && letter <= '9') number += letter;
    return "-D__CUDA_ARCH__=" + number + "0";
}

int compile(Program& program, const std::string& folder, int count, const char* const* options) {
    const std::string kernel = kernel_of(program.text);
    if (kernel.empty()) {
        program.log = "the twin finds no kernel in " + program.name;
        return kCompilation;
    }
    const std::string own = home();
    for (const auto& [name, text] : program.headers) {
        /* The twin's own of that name come first. */
        if (access((own + "/device/" + name).c_str(), R_OK) == 0) continue;
        if (!write(folder + "/" + name, text)) return kInternal;
    }
    std::ostringstream text;
    text << "#include \"machine.h\"\n#include \"cuda_words.h\"\n#line 1 \"" << base_name(program.name) << "\"\n" << program.text
         << "\n#include \"entry.h\"\nTWIN_ENTRY(\"" << kernel << "\", " << kernel << ");\n";
    if (!write(folder + "/kernel.cpp", text.str())) return kInternal;
    const char* named = std::getenv("CXX");
    std::vector<std::string> words = {named && *named ? named : "g++", "-shared"};
    std::istringstream flags(TWIN_FLAGS);
    for (std::string flag; flags >> flag;) words.push_back(flag);
    for (int i = 0; i < count; ++i) {
        const std::string option = options[i];
        if (option.rfind("-D", 0) == 0) words.push_back(option);
        else if (option.rfind("--gpu-architecture=", 0) == 0) words.push_back(arch_of(option));
        else if (option != "--std=c++17" && option != "--fmad=false") {
            program.log = "the twin's compiler has no option " + option;
            return kInvalidInput;
        }
    }
    words.insert(words.end(), {"-I" + own + "/device", "-I" + folder, "-o", folder + "/module.so", folder + "/kernel.cpp", own + "/libcuda.so"});
    const int status = run(words, folder + "/log");
    program.log = read(folder + "/log");
    if (status != 0) {
        if (program.log.empty()) program.log = words[0] + " does not run, or was killed";
        return kCompilation;
    }
    program.module = read(folder + "/module.so");
    return program.module.empty() ? kInternal : kSuccess;
}

void remove_folder(const std::string& folder) {
    if (DIR* open = opendir(folder.c_str())) {
        while (const dirent* entry = readdir(open)) unlink((folder + "/" + entry->d_name).c_str());
        closedir(open);
    }
    rmdir(folder.c_str());
}

} /* namespace */

/* Not NVIDIA's: 0. Then a number of the twin's own text, so that no kernel of another twin is taken for its. */
TWIN int nvrtcVersion(int* major, int* minor) {
    *major = 0;
    *minor = TWIN_VERSION;
    return kSuccess;
}
TWIN int nvrtcCreateProgram(Program** out, const char* text, const char* name, int headers, const char* const* texts,
                            const char* const* names) {
    *out = new Program{text, name, "", "", {}};
    for (int i = 0; i < headers; ++i) (*out)->headers.emplace_back(names[i], texts[i]);
    return kSuccess;
}
TWIN int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return kSuccess;
}
TWIN int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    const char* named = std::getenv("TMPDIR");
    std::string folder = std::string(named && *named ? named : "/tmp") + "/cuda-twin-XXXXXX";
    if (!mkdtemp(folder.data())) return kInternal;
    const int result = compile(*program, folder, count, options);
    remove_folder(folder);
    return result;
}
TWIN int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
    *bytes = program->module.size();
    return *bytes ? kSuccess : kInvalidProgram;
}
TWIN int nvrtcGetCUBIN(Program* program, char* to) {
    std::memcpy(to, program->module.data(), program->module.size());
    return kSuccess;
}
TWIN int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
    *bytes = program->log.size() + 1;
    return kSuccess;
}
TWIN int nvrtcGetProgramLog(Program* program, char* to) {
    std::memcpy(to, program->log.c_str(), program->log.size() + 1);
    return kSuccess;
}
TWIN const char* nvrtcGetErrorString(int) { return "an error of the twin's compiler"; }
